"""What the plain model does not do is refused by name before anything is exported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rotexp.experiment.exporting import _check_requirements
from rotexp.experiment.options import ExportOptions


def finished(**must_run: Any) -> Any:
    """Return the model of a finished run, of which only what decides about an export is there."""
    return SimpleNamespace(
        checkpoint=SimpleNamespace(config=SimpleNamespace(model_type="stablelm")),
        model=SimpleNamespace(added=set()),
        must_run={"online": [], "rms_norms": [], **must_run},
        trained=None,
    )


def test_norms_of_another_kind_are_refused_with_the_model_s_type() -> None:
    needed = r"^export\.online=false: the merged model needs 2 norms of model_type=stablelm as RMSNorm at run time"
    with pytest.raises(ValueError, match=needed):
        _check_requirements(finished(rms_norms=["norm", "layers.0.norm"]), ExportOptions(path="model"))
    _check_requirements(finished(rms_norms=["norm"]), ExportOptions(path="model", online=True))
    _check_requirements(finished(), ExportOptions(path="model"))
