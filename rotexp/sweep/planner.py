"""From the overrides that Hydra's sweepers make to the jobs of a sweep."""

from __future__ import annotations

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

from rotexp.compose import to_config
from rotexp.sweep.names import axes_of, job_name
from rotexp.sweep.outcome import Job, Outcome, grouped
from rotexp.sweep.sweep import Sweep
from rotexp.wrong_request import REFUSALS, explain

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
        self.keys = swept_keys([*_parameters(master.hydra.sweeper), *master.hydra.overrides.task])
        if sweep is not None:
            setup_globals()
            sweep.folder = Path(str(master.hydra.sweep.dir))

    def plan(self, batch: Sequence[Sequence[str]], *, first: int) -> Planned:
        """Compose and check a batch of jobs, the first of which has that number."""
        assert self.sweep is not None
        planned = Planned()
        for number, overrides in enumerate(batch, start=first):
            axes = axes_of(overrides, self.keys)
            name = job_name(axes)
            name = f"{name} ({number})" if name in planned.names else name
            planned.names.append(name)
            self.sweep.expect(name, axes)
            try:
                job = self._job(name, axes, list(overrides), number)
                if any(job.folder == other.folder for other in planned.jobs.values()):
                    values = " ".join(f"{key}={value}" for key, value in axes.items())
                    raise ValueError(f"{values or job.folder}: stands twice in this sweep; give each value once")
                planned.jobs[name] = job
                planned.right.append(overrides)
            except REFUSALS as error:
                self.sweep.refuse(name, axes, explain(error))
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
            folder = Path(str(self.master.hydra.sweep.dir)) / str(composed.hydra.sweep.subdir)
            del composed["hydra"]
        return Job(name, axes, folder, grouped(to_config(composed), folder))


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
