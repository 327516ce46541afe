"""What a run would find on this machine, and what to do where something is missing."""

from __future__ import annotations

import importlib.util
import os
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from rich.markup import escape
from rich.table import Table

from rotexp.process.host_memory import available_bytes

GIB = 2**30
NETWORK_SECONDS = 5.0
"""How long a server may take to answer, its name's look-up included."""

NEEDED_DISK_GIB, NEEDED_MEMORY_GIB = 1.0, 2.0
"""For a run with the defaults: room in its folder, and memory of its one process, which peaks at 1.0 to 1.5 GiB."""

EXTRAS = {
    "gguf": ("gguf", "sentencepiece"),
    "hub": ("datasets",),
    "dashboard": ("wandb_workspaces",),
    "bench": ("geoopt",),
    "slurm": ("hydra_plugins.hydra_submitit_launcher",),
    "ray": ("hydra_plugins.hydra_ray_launcher",),
    "optuna": ("hydra_plugins.hydra_optuna_sweeper",),
}
"""The modules each optional part brings."""


@dataclass(frozen=True)
class Check:
    """One thing looked for.

    Attributes:
        name: what it is.
        found: what was found, in words.
        remedy: what to do where it is missing, empty where it is there.
        needed: whether a run with the defaults needs it.
    """

    name: str
    found: str
    remedy: str = ""
    needed: bool = False


def look(folder: Path) -> Iterator[Check]:
    """Yield every check, in the order of the table.

    Args:
        folder: where runs would be written.
    """
    yield libraries()
    yield accelerator()
    yield nccl()
    yield cores()
    yield integer_units()
    yield memory()
    yield disk(folder)
    yield wandb_login()
    yield hub()
    for extra, modules in EXTRAS.items():
        yield optional_part(extra, modules)


def checks_table(checks: list[Check]) -> Table:
    """Return the checks as a table."""
    table = Table(title="what a run would find here", title_justify="left")
    for column in ("", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        style = "" if not check.remedy else "red" if check.needed else "yellow"
        table.add_row(check.name, escape(check.found), escape(check.remedy), style=style)
    return table


def libraries() -> Check:
    """Look whether every package rotexp requires is installed, in the range it requires."""
    wrong = []
    for text in requires("rotexp") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            installed = _version(requirement.name)
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                wrong.append(f"{requirement.name} {installed or 'missing'}")
    remedy = "install rotexp anew: pip install -e . in its checkout" if wrong else ""
    return Check("libraries", ", ".join(wrong) or f"torch {_version('torch')}, all as required", remedy, needed=True)


def accelerator() -> Check:
    """Look for devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        build = "built with CUDA" if torch.version.cuda else "built for CPU"
        return Check(
            "accelerator", f"none (torch is {build})", "runs go on the CPU; else install torch for your device"
        )
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names = sorted({f"{device.name} with {device.total_memory / GIB:.0f} GiB" for device in properties})
    return Check("accelerator", f"{len(properties)} x {', '.join(names)}")


def nccl() -> Check:
    """Look for the library by which accelerators talk to each other."""
    import torch
    from torch.distributed import is_available, is_nccl_available

    if is_available() and is_nccl_available():
        return Check("nccl", "there")
    remedy = "install torch built with nccl, or runs of several ranks fail" if torch.cuda.is_available() else ""
    return Check("nccl", "none" if remedy else "none, and none needed without an accelerator (gloo serves)", remedy)


def cores() -> Check:
    """Count the cores this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", str(count))


def integer_units() -> Check:
    """Look for units on which codes of quantized weights and activations are multiplied."""
    from rotexp.quant.integer_products import has_integer_units

    if has_integer_units():
        return Check("integer units", "AVX-512 VNNI: quantized weights and activations are multiplied as int8")
    return Check("integer units", "no AVX-512 VNNI: quantized weights and activations are multiplied as values")


def memory() -> Check:
    """Measure the memory that is free, where the system says it."""
    free = available_bytes()
    if free is None:
        return Check("memory", "unknown: the system does not say")
    remedy = (
        "" if free >= NEEDED_MEMORY_GIB * GIB else f"close other programs; the defaults take {NEEDED_MEMORY_GIB} GiB"
    )
    return Check("memory", f"{free / GIB:.1f} GiB free", remedy, needed=True)


def disk(folder: Path) -> Check:
    """Measure the free space where runs would be written, and whether they may be."""
    free = shutil.disk_usage(folder).free / GIB
    if not os.access(folder, os.W_OK):
        return Check("disk", f"{folder} cannot be written", "go elsewhere, or set hydra.run.dir=DIR", needed=True)
    remedy = (
        "" if free >= NEEDED_DISK_GIB else f"free some, or set hydra.run.dir=DIR; a run takes {NEEDED_DISK_GIB} GiB"
    )
    return Check("disk", f"{free:,.1f} GiB free in {folder}", remedy, needed=True)


def wandb_login() -> Check:
    """Look whether somebody is logged in to W&B."""
    from rotexp.tracking.wandb import has_key

    if has_key():
        return Check("wandb login", "there")
    return Check(
        "wandb login", "none, runs are recorded offline", "wandb login; python -m rotexp.upload DIR uploads them"
    )


def hub(environment: Mapping[str, str] = os.environ) -> Check:
    """Look whether the hub answers."""
    if environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", "switched off by HF_HUB_OFFLINE", "unset it to load models from the hub")
    address = environment.get("HF_ENDPOINT", "https://huggingface.co")
    answer = within(lambda: _answers(address), seconds=NETWORK_SECONDS)
    if answer is None:
        return Check("hub", f"{address} answers")
    return Check("hub", f"{address}: {answer}", "model=tiny and data=builtin need none; else load models beforehand")


def optional_part(extra: str, modules: tuple[str, ...]) -> Check:
    """Look whether the modules of an optional part can be imported."""
    missing = [name for name in modules if not _importable(name)]
    remedy = f"pip install 'rotexp[{extra}]'" if missing else ""
    return Check(f"extra {extra}", f"{', '.join(missing)} missing" if missing else "there", remedy)


def within(look_up: Callable[[], str | None], *, seconds: float) -> str | None:
    """Return what a call returns, or that it took too long; a look-up of a name heeds no time limit of its own."""
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(look_up()), name="doctor", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:.0f} s"


def _answers(address: str) -> str | None:
    """Return None if a server answers, be it with an error, else why not."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=NETWORK_SECONDS).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))
    return None


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package is there
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
