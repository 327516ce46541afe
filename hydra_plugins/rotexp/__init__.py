"""The sweeper and the launcher of rotexp, in the only place where Hydra takes them from."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from rotexp.process.outer import adopt
from rotexp.process.saying import tell
from rotexp.sweep.planner import Planner, returned, sweep_of


class LocalLauncher(BasicLauncher):
    """Runs each job of a training sweep in processes of its own; jobs of other commands here, one after the other."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what the jobs are made of."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.planner = Planner(hydra_context, config, sweep_of(task_function))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; each returns its optimized metric."""
        sweep = self.planner.sweep
        if sweep is None:
            results: Sequence[JobReturn] = super().launch(job_overrides, initial_job_idx)
            return results
        if adopt() is not None:
            raise ValueError("-m: every job starts its own ranks; start the sweep without torchrun or srun")
        planned = self.planner.plan(job_overrides, first=initial_job_idx)
        if jobs := list(planned.jobs.values()):
            sweep.run(jobs, options=jobs[0].config.sweep)
        return [returned(sweep.outcomes[name]) for name in planned.names]


class RecordingSweeper(BasicSweeper):
    """Runs the product of all values; a job that is wrong is a result, and does not end the sweep."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self.planner = Planner(hydra_context, config, sweep_of(task_function))

    def sweep(self, arguments: list[str]) -> None:
        """Run all jobs."""
        launcher = self.launcher
        assert launcher is not None
        if self.planner.sweep is None:
            super().sweep(arguments)
            return
        lines = [*self._parse_config(), *arguments]
        parsed = OverridesParser.create(config_loader=self.planner.loader).parse_overrides(lines)
        first = 0
        for batch in self.split_arguments(parsed, self.max_batch_size):
            if isinstance(launcher, LocalLauncher):
                launcher.launch(batch, initial_job_idx=first)
            else:
                self._submit(launcher, batch, first=first)
            first += len(batch)

    def _submit(self, launcher: Launcher, batch: Sequence[Sequence[str]], *, first: int) -> None:
        """Give the jobs that are right to a scheduler, wait, and read from their folders how they ended."""
        planned = self.planner.plan(batch, first=first)
        try:
            if planned.right:
                launcher.launch(planned.right, initial_job_idx=first)
        except Exception as error:  # whatever a scheduler raises when it refuses, or a job of it fails
            tell(f"the scheduler: {type(error).__name__}: {error}")
        finally:
            self.planner.read(planned)
