"""Export a finished run: `python -m rotexp.export run=DIR export.path=DIR` writes a checkpoint, or `R.bin`."""

from __future__ import annotations

from rotexp.config.explanations import Vocabulary
from rotexp.experiment.export_request import export
from rotexp.experiment.options import ExportConfig
from rotexp.launch.command_line import run_command


def main() -> None:
    """Compose the request from the command line, and export."""
    run_command(export, config_name="export", known=Vocabulary(ExportConfig, grouped=False))


if __name__ == "__main__":
    main()
