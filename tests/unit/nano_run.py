"""The configuration of a run that takes a second: the smallest random model, on two modules of the standard library."""

from __future__ import annotations

import ast
import typing

from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import DataConfig, DataSource
from rotexp.metrics.options import EvaluationConfig
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.optim.options import CayleySGDConfig
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.tracking.options import TrackerConfig, TrackerKind
from rotexp.training.options import TrainConfig

NANO = Config(
    model=ModelConfig("random", ModelSource.random, size="nano", dtype=ModelDtype.float32),
    data=DataConfig(
        "text",
        DataSource.text,
        calibration=typing.__file__,
        evaluation=ast.__file__,
        sequence_length=16,
        global_batch_size=2,
    ),
    evaluation=EvaluationConfig(window=16, max_windows=2),
    quant=QuantConfig("w4", weights=QuantSpec(4)),
    optimizer=CayleySGDConfig(),
    objective=COMPONENTS["objective"]["ce"],
    train=TrainConfig(steps=2, checkpoint_every=None),
    tracker=TrackerConfig(kind=TrackerKind.jsonl),
)
