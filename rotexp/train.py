"""The main job: `python -m rotexp.train [group=option] [key=value]` trains rotations and shows what they bought."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rotexp.config.composition import to_config
from rotexp.launch.command_line import run_command
from rotexp.sweep.outcome import grouped
from rotexp.sweep.scheduled import is_done
from rotexp.sweep.sweep import Sweep
from rotexp.tracking.limits import check_tracker


def train(composed: DictConfig) -> int:
    """Carry out one composed run and return its exit code."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    config = to_config(composed)
    check_tracker(config.tracker)
    if HydraConfig.get().mode is RunMode.MULTIRUN:  # a scheduler started this job of a sweep
        if is_done(config, folder):
            return 0
        config = grouped(config, Path(HydraConfig.get().sweep.dir))
    from rotexp.launch.start import start

    return start(config, folder)


def main() -> None:
    """Compose the configuration from the command line, and train."""
    run_command(train, sweep=Sweep())


if __name__ == "__main__":
    main()
