"""Checks of the user's own parts against what rotexp expects of them; each raises AssertionError with one line."""

from rotexp.testing.objectives import check_objective
from rotexp.testing.optimizers import check_optimizer
from rotexp.testing.quantizers import check_quantizer
from rotexp.testing.schedulers import check_scheduler
from rotexp.testing.sources import check_data_source
from rotexp.testing.starts import check_start
from rotexp.testing.strategies import check_strategy
from rotexp.testing.trackers import check_tracker

__all__ = [
    "check_data_source",
    "check_objective",
    "check_optimizer",
    "check_quantizer",
    "check_scheduler",
    "check_start",
    "check_strategy",
    "check_tracker",
]
