"""What a run takes over from a checkpoint goes by what the two configurations have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rotexp.config.composition import to_plain
from rotexp.config.schema import COMPONENTS, Config
from rotexp.experiment.beginning import Beginning
from rotexp.experiment.taking_over import TakenOver
from rotexp.metrics.options import EvaluationConfig
from rotexp.optim.options import CayleySGDConfig
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.runfolder.checkpoint_folders import FORMAT

PROTOCOL = {"windows": 4}
CONFIG = Config(
    optimizer=CayleySGDConfig(),
    objective=COMPONENTS["objective"]["ce"],
    quant=QuantConfig(name="w4", weights=QuantSpec(4)),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The folder of a run's own checkpoint, as far as it is read before any model is there."""
    facts: dict[str, Any] = {
        "state": {"seconds": 3.0},
        "evaluation": {"protocol": PROTOCOL, "quantized": {"perplexity": 2.0}},
        "phases": {},
        "tracker": {"run_id": None},
        "config": to_plain(CONFIG),
    }
    whole = {"format": FORMAT, "step": 3, "world_size": 1, "files": {}, "facts": facts}
    (tmp_path / "facts.json").write_text(json.dumps(whole))
    return tmp_path


def taken_over(path: Path, config: Config, **protocol: int) -> TakenOver:
    return TakenOver(Beginning(path, own=True), config, protocol=PROTOCOL | protocol)


def test_measuring_more_often_changes_neither_the_rows_nor_the_best(path: Path) -> None:
    found = taken_over(path, replace(CONFIG, evaluation=EvaluationConfig(every=2)))
    assert found.evaluation["quantized"] == {"perplexity": 2.0}
    assert found._compares_with_best()


@pytest.mark.parametrize(
    "changed",
    [
        {"quant": QuantConfig(name="w3", weights=QuantSpec(3))},
        {"objective": COMPONENTS["objective"]["kl"]},
    ],
)
def test_a_loss_of_another_quantizer_or_objective_says_nothing_about_the_best(path: Path, changed: Any) -> None:
    assert not taken_over(path, replace(CONFIG, **changed))._compares_with_best()


def test_other_windows_are_measured_anew(path: Path) -> None:
    found = taken_over(path, CONFIG, windows=5)
    assert found.evaluation == {}
    assert not found._compares_with_best()
