"""From the overrides that Hydra's sweepers make to the jobs of a sweep."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict

from rotexp.config.composition import to_config
from rotexp.config.explanations import REFUSALS, explain
from rotexp.sweep.names import axes_of, job_name
from rotexp.sweep.outcome import Job, Outcome, grouped
from rotexp.sweep.sweep import Sweep
from rotexp.tracking.limits import check_sweep, check_tracker

MODULE = "hydra_plugins.rotexp"
PLUGINS: dict[str, tuple[str, dict[str, Any]]] = {
    "launcher": ("LocalLauncher", {}),
    "sweeper": ("RecordingSweeper", {"max_batch_size": None, "params": None}),
}
"""What stands in the place of Hydra's `basic` ones, and their options."""


@dataclass
class Planned:
    """A batch of jobs.

    Attributes:
        names: of all jobs, those that are wrong included.
        jobs: those that are right, by name.
        right: their overrides.
    """

    names: list[str] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    right: list[Sequence[str]] = field(default_factory=list)


class Planner:
    """Turns the overrides of jobs into jobs; records those that are wrong."""

    def __init__(self, context: HydraContext, master: DictConfig, sweep: Sweep | None) -> None:
        """Plan for a sweep, which is given its folder.

        Args:
            master: the configuration of the sweep itself.
        """
        self.loader, self.master, self.sweep = context.config_loader, master, sweep
        self.owners: dict[Path, Job] = {}
        self.keys = swept_keys([*_parameters(master.hydra.sweeper), *master.hydra.overrides.task])
        if sweep is not None:
            setup_globals()
            sweep.folder = Path(str(master.hydra.sweep.dir))

    def plan(self, batch: Sequence[Sequence[str]], *, first: int) -> Planned:
        """Compose and check a batch of jobs, the first of which has that number.

        Raises:
            ValueError: a job has no folder of its own below the sweep's, or all would be one W&B run; nothing was
                recorded then.
        """
        assert self.sweep is not None
        planned, axes = Planned(), [axes_of(overrides, self.keys) for overrides in batch]
        refused: dict[str, str] = {}
        for number, overrides in enumerate(batch, start=first):
            varied = axes[number - first]
            name = job_name(varied)
            name = f"{name} ({number})" if name in planned.names else name
            planned.names.append(name)
            try:
                job = self._job(name, varied, list(overrides), number)
                if any((job.folder, job.axes) == (other.folder, other.axes) for other in planned.jobs.values()):
                    raise ValueError(f"{_values(job)}: stands twice in this sweep; give each value once")
                planned.jobs[name] = job
                planned.right.append(overrides)
            except REFUSALS as error:
                refused[name] = explain(error)
        self._require_folders(planned.jobs.values())
        check_sweep([job.config.tracker for job in planned.jobs.values()])
        for name, varied in zip(planned.names, axes, strict=True):
            self.sweep.expect(name, varied)
        for name, reason in refused.items():
            self.sweep.refuse(name, self.sweep.outcomes[name].axes, reason)
        return planned

    def read(self, planned: Planned) -> None:
        """Record how jobs ended that somebody else ran."""
        assert self.sweep is not None
        self.sweep.read(planned.jobs.values())

    def _job(self, name: str, axes: dict[str, str], overrides: list[str], number: int) -> Job:
        composed = self.loader.load_sweep_config(self.master, overrides)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            sweep = Path(str(self.master.hydra.sweep.dir))
            folder = Path(os.path.normpath(sweep / str(composed.hydra.sweep.subdir)))
            del composed["hydra"]
        config = grouped(to_config(composed), sweep)
        check_tracker(config.tracker)
        return Job(name, axes, folder, config)

    def _require_folders(self, jobs: Iterable[Job]) -> None:
        """Refuse the sweep where jobs would share a folder, or one lies outside the sweep's, which cannot be moved."""
        assert self.sweep is not None
        assert self.sweep.folder is not None
        subdir = OmegaConf.to_container(self.master.hydra.sweep, resolve=False)["subdir"]  # type: ignore[call-overload, index]
        where = f"hydra.sweep.subdir={subdir}"
        remedy = "leave it out, or let it differ from job to job below hydra.sweep.dir, as '${hydra.job.num}' does"
        sweep = Path(os.path.abspath(self.sweep.folder))
        for job in jobs:
            folder = Path(os.path.abspath(job.folder))
            if sweep not in folder.parents:
                raise ValueError(f"{where}: {folder} does not lie below hydra.sweep.dir={sweep}; {remedy}")
            other = self.owners.setdefault(folder, job)
            if other.axes != job.axes:
                raise ValueError(f"{where}: gives {_values(other)} and {_values(job)} one folder, {folder}; {remedy}")


def _values(job: Job) -> str:
    return " ".join(f"{key}={value}" for key, value in job.axes.items()) or str(job.folder)


def swept_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys to which overrides give several values, or a distribution."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [str(override.get_key_element()) for override in parsed if override.is_sweep_override()]


def _parameters(sweeper: Any) -> list[str]:
    """Return what a sweeper's own configuration varies, as overrides."""
    parameters = OmegaConf.select(sweeper, "params") or {}
    return [f"{key}={value}" for key, value in parameters.items()]


def sweep_of(task_function: Any) -> Sweep | None:
    """Return the sweep that a command keeps, if its jobs are to run in processes of their own."""
    sweep: Sweep | None = getattr(task_function, "sweep", None)
    return sweep


def returned(outcome: Outcome) -> JobReturn:
    """Return what Hydra's sweepers read: the optimized metric, or None, which Optuna takes for a failed trial."""
    overrides = [f"{key}={value}" for key, value in outcome.axes.items()]
    result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
    result.return_value = outcome.metric
    return result


def register_planning(swept: Sequence[str]) -> None:
    """Choose our launcher and sweeper where Hydra would take its own, and give it the names of jobs.

    Args:
        swept: the keys that the command line varies.
    """
    plugins, store = Plugins.instance(), ConfigStore.instance()  # Hydra's own first, to replace them
    module = import_module(MODULE)
    for group, (name, node) in PLUGINS.items():
        plugins.register(getattr(module, name))  # an editable install hides it from Hydra's search
        store.store("basic", {**node, "_target_": f"{MODULE}.{name}"}, group=f"hydra/{group}")

    def name_of(overrides: Sequence[str], sweeper: Any) -> str:
        return job_name(axes_of(overrides, [*swept_keys(_parameters(sweeper)), *swept]))

    OmegaConf.register_new_resolver("job_name", name_of, replace=True)
