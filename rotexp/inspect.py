"""Show what would be rotated: `python -m rotexp.inspect model=…`, without loading weights."""

from __future__ import annotations

from omegaconf import DictConfig

from rotexp.config.composition import to_config
from rotexp.launch.command_line import run_command
from rotexp.process.imports import uncollected


def inspect(composed: DictConfig) -> int:
    """Print one composed request's placements and return the exit code.

    Raises:
        ValueError: the request is wrong, or the model cannot be described.
    """
    config = to_config(composed)
    with uncollected():
        from rich.console import Console

        from rotexp.models.load import open_structure
        from rotexp.rotation.survey import survey
        from rotexp.tracking.survey_tables import survey_tables

    found = survey(open_structure(config.model), config.rotation, config.quant, seed=config.seed)
    Console(highlight=False).print(*survey_tables(found), sep="\n")
    return 0


def main() -> None:
    """Compose the configuration from the command line, and inspect."""
    run_command(inspect, config_name="inspect")


if __name__ == "__main__":
    main()
