"""The main job: `python -m rotexp.train [group=option] [key=value]` trains rotations and shows what they bought."""

from __future__ import annotations

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from rotexp.command_line import run_command
from rotexp.compose import to_config


def train(composed: DictConfig) -> int:
    """Carry out one composed run and return its exit code."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    config = to_config(composed)
    from rotexp.launch.start import start

    return start(config, folder)


def main() -> None:
    """Compose the configuration from the command line, and train."""
    run_command(train)


if __name__ == "__main__":
    main()
