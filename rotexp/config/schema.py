"""The schema of every run: the options of every part, collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from rotexp.config.components import component_of
from rotexp.data.options import DataConfig
from rotexp.errors.requirements import MISSING
from rotexp.files.reading import read_yaml
from rotexp.launch.options import LaunchConfig
from rotexp.metrics.options import EvaluationConfig, MetricsConfig
from rotexp.models.options import ModelConfig
from rotexp.optim.options import CayleySGDConfig
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.sharding.options import ShardingConfig, SyncConfig
from rotexp.sweep.options import SweepConfig
from rotexp.tracking.options import TrackerConfig
from rotexp.training.options import (
    AdamWConfig,
    EMAConfig,
    NumericsConfig,
    TopKObjectiveConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        seed: of everything random: the rotations' start, the order of blocks, a random model's weights.
        resume: `auto` continues an unfinished run in the same folder from its newest complete checkpoint, `never` does
            not; a folder is that of a run, or one checkpoint of it, to start from.
        plugins: modules of your own that `_target_` may name; typed, for no file grants them, and never recorded.
        profile: leave a torch profiler trace of a few steps in the run's folder, and a table of where they went.
    """

    seed: int = 0
    resume: str = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    rotation: RotationConfig = field(default_factory=RotationConfig)
    optimizer: Any = MISSING
    objective: Any = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    sync_mode: SyncConfig = field(default_factory=SyncConfig)
    numerics: NumericsConfig = field(default_factory=NumericsConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    plugins: list[str] = field(default_factory=list)
    profile: bool = False


def _parts(group: str, *typed: Any) -> dict[str, Any]:
    """Return what every file of a group describes: a part with options of its own type, or with any.

    Args:
        typed: the parts whose options have a dataclass.
    """
    folder = Path(str(files("rotexp.conf") / group))
    described = {file.stem: read_yaml(file) for file in sorted(folder.glob("*.yaml"))}
    return {name: component_of(values) for name, values in described.items()} | {part.name: part for part in typed}


COMPONENTS: dict[str, dict[str, Any]] = {
    "optimizer": _parts("optimizer", CayleySGDConfig()),
    "objective": _parts("objective", TopKObjectiveConfig()),
}
"""The part that each option of a group stands for, with its defaults."""


RECORDING = (
    "sweep.",
    "tracker.",
    "resume",
    "launch.threads",
    "launch.timeout_minutes",
    "launch.grace_seconds",
    "launch.rdzv_",
)
"""Beginnings of keys that say how a run is started and recorded, and change nothing of what it computes."""
