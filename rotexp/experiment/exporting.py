"""Write what a finished run ended with: a checkpoint with its rotations merged, or `R.bin`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from rotexp.config.composition import config_digest, to_plain
from rotexp.errors.wording import dtype_name
from rotexp.experiment.finished_model import FinishedModel, build_finished, merge_finished
from rotexp.experiment.options import ExportDtype, ExportFormat, ExportOptions
from rotexp.files.folders import complete_folder
from rotexp.models.save import MANIFEST_FILE, companions, save_checkpoint
from rotexp.models.tokenizer import code_of_its_own, load_tokenizer
from rotexp.rotation.file import save_r_bin
from rotexp.runfolder.finished_run import FinishedRun


def write_export(run: FinishedRun, options: ExportOptions, target: Path, *, say: Callable[[str], None]) -> None:
    """Build a run's model, check, merge and write it.

    Args:
        say: takes lines for people.

    Raises:
        ValueError: the request is wrong; nothing was written then.
        ArithmeticError: rotating or merging changed the float model.
        OSError: writing failed.
    """
    finished = build_finished(run)
    _check_requirements(finished, options)
    if options.format is ExportFormat.checkpoint:
        _check_companions(finished)
    error = merge_finished(finished)
    say(f"invariance: relative logit error {error:.1e}")
    write = _write_checkpoint if options.format is ExportFormat.checkpoint else _write_r_bin
    say(write(run, finished, options, target))


def _check_requirements(finished: FinishedModel, options: ExportOptions) -> None:
    """Refuse what the format cannot hold, and what a plain model cannot do unless asked for.

    Raises:
        ValueError: there are no rotations to write, merged parameters have no place in the plain model, a transform
            must run online, or norms must run as another kind.
    """
    if options.format is ExportFormat.r_bin and not finished.loaded.matrices:
        raise ValueError("export.format=r_bin: this run has no rotations; set export.format=checkpoint")
    if options.format is ExportFormat.r_bin and finished.trained is not None:
        raise ValueError(
            "export.format=r_bin: more than rotations was trained, which R.bin does not hold; set "
            "export.format=checkpoint"
        )
    model = finished.model
    if fault := plain_fault(model.added, finished.must_run, options, model_type=finished.checkpoint.config.model_type):
        raise ValueError(fault)


def plain_fault(
    added: Collection[str],
    must_run: Mapping[str, Any],
    options: ExportOptions,
    *,
    model_type: str,
    first: str = "",
) -> str | None:
    """Say what a plain model cannot hold, or cannot do unless asked for, and all that has to be set.

    Args:
        added: parameters that the plain model lacks.
        must_run: of `rotexp.experiment.finished_model.requirements`.
        first: what has to be done before rotations can be exported in place of a checkpoint.
    """
    needs = [f"{transform['name']} of order {transform['order']}" for transform in must_run["online"]]
    if norms := must_run["rms_norms"]:
        needs.append(f"{len(norms)} norms of model_type={model_type} as RMSNorm")
    unasked = f"needs {' and '.join(needs)} at run time" if needs and not options.online else ""
    if options.format is ExportFormat.checkpoint and added:
        return (
            f"export.format=checkpoint: the merged model has {len(added)} parameters that the plain one lacks (such as "
            f"{min(added)}){unasked and ' and '}{unasked}; {first}set export.format=r_bin"
            f"{unasked and ' and export.online=true'}"
        )
    if unasked:
        return (
            f"export.online=false: the merged model {unasked}, which plain transformers does not do; set "
            f"export.online=true to export all the same, with a manifest that says so"
        )
    return None


def _check_companions(finished: FinishedModel) -> None:
    """Refuse a tokenizer or generation config that is lost or damaged since the run, before the model is read.

    Raises:
        ValueError: one cannot be read; its file is named.
    """
    load_tokenizer(finished.checkpoint)
    companions(finished.checkpoint)


def _manifest(run: FinishedRun, finished: FinishedModel, options: ExportOptions) -> dict[str, Any]:
    """Say what was exported, from what, and what it takes to run it."""
    plain, checkpoint = to_plain(run.config), finished.checkpoint
    return {
        "rotexp": version("rotexp"),
        "format": options.format.name,
        "source": {"id": checkpoint.identity, "revision": checkpoint.revision},
        "config_digest": config_digest(run.config),
        "seed": run.config.seed,
        "rotations": {
            name: {"placement": finished.model.placements[name], "shape": list(matrix.shape)}
            for name, matrix in finished.loaded.matrices.items()
        },
        "must_run": finished.must_run,
        "trained_for": plain["quant"],
        "trained": run.config.train.params.name,
    }


def _write_checkpoint(run: FinishedRun, finished: FinishedModel, options: ExportOptions, target: Path) -> str:
    """Write the merged model; returns what to tell people."""
    checkpoint = finished.checkpoint
    copied = companions(checkpoint)
    wanted = run.config.model.dtype.name if options.dtype is ExportDtype.auto else options.dtype.name
    dtype = dtype_name(checkpoint.dtype) if wanted == "auto" else wanted
    save_checkpoint(
        target,
        finished.model.network.state_dict(),
        checkpoint.config,
        dtype=getattr(torch, dtype),
        tokenizer=None if copied else load_tokenizer(checkpoint),
        copied=copied,
        manifest=_manifest(run, finished, options) | {"dtype": dtype},
        clip_ratios=finished.model.scales.ratios() if finished.model.scales else None,
        source_shapes=checkpoint.weights.shapes(),
        max_shard_size=options.max_shard_size,
    )
    code = code_of_its_own(Path(checkpoint.tokenizer))
    note = code and f"\nnote: tokenizer_config.json names code ({code}), which was not copied; load it without"
    return f'wrote {target} ({dtype}); load it by AutoModelForCausalLM.from_pretrained("{target}"){note}'


def _write_r_bin(run: FinishedRun, finished: FinishedModel, options: ExportOptions, target: Path) -> str:
    """Write the rotations as `R.bin`; returns what to tell people."""
    with complete_folder(target, key="export.path") as folder:
        save_r_bin(folder / "R.bin", finished.loaded.matrices, layers=finished.model.spec.layers)
        text = json.dumps(_manifest(run, finished, options), indent=2)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    return f'wrote {target}/R.bin; load it by torch.load("{target}/R.bin", weights_only=True)'
