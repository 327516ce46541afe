"""What Hydra calls in a sweep: the sweeper that records wrong jobs, and the launcher of jobs on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from rotexp.compose import to_config
from rotexp.launch.outer import adopt
from rotexp.sweep.names import axes_of, job_name
from rotexp.sweep.outcome import Job, Outcome, Status
from rotexp.sweep.sweep import Sweep
from rotexp.wrong_request import REFUSALS, explain

NAMESPACE = "hydra_plugins.rotexp"
"""The only kind of module name under which Hydra takes launchers and sweepers."""


def swept_keys(overrides: Iterable[str]) -> list[str]:
    """Return the keys to which overrides give several values, or a distribution."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override.get_key_element() for override in parsed if override.is_sweep_override()]


def _all_swept(config: DictConfig) -> list[str]:
    """Return what a sweep varies, by its command line and its sweeper's parameters."""
    given = [str(override) for override in config.hydra.overrides.task]
    return swept_keys([*_parameters(config.hydra.sweeper), *given])


def _parameters(sweeper: Any) -> list[str]:
    parameters = OmegaConf.select(sweeper, "params") or {}
    return [f"{key}={value}" for key, value in parameters.items()]


class LocalLauncher(BasicLauncher):
    """Runs every job of a training sweep as a child process; jobs of other commands in this process, in turn."""

    __module__ = NAMESPACE

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; the return value of each is its optimized metric."""
        sweep = sweep_of(self.task_function)
        if sweep is None:
            return super().launch(job_overrides, initial_job_idx)  # type: ignore[no-any-return]
        if adopt() is not None:
            raise ValueError("-m: starts processes of its own; start a sweep without torchrun or srun")
        assert self.config is not None
        setup_globals()
        sweep.folder = Path(str(self.config.hydra.sweep.dir))
        outcomes = [self._job(overrides, number + initial_job_idx) for number, overrides in enumerate(job_overrides)]
        jobs: list[Job] = []
        for entry in outcomes:
            ...
        return [_returned(sweep.outcomes[entry.name]) for entry in outcomes]
