"""Measure held-out text again: `python -m rotexp.evaluate run=DIR`, or `model=…` for a model as it comes."""

from __future__ import annotations

from rotexp.config.explanations import Vocabulary
from rotexp.experiment.evaluation_request import evaluate
from rotexp.experiment.options import EvaluateConfig
from rotexp.launch.command_line import run_command


def main() -> None:
    """Compose the request from the command line, and evaluate."""
    run_command(evaluate, config_name="evaluate", known=Vocabulary(EvaluateConfig, grouped=False))


if __name__ == "__main__":
    main()
