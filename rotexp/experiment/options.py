"""What the commands beside training take: an export, an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from rotexp.data.options import DataConfig
from rotexp.errors.requirements import MISSING
from rotexp.metrics.options import EvaluationConfig
from rotexp.models.options import ModelConfig
from rotexp.quant.options import QuantConfig


class ExportFormat(Enum):
    """What an export writes: a plain Hugging Face checkpoint, or the rotations as `R.bin`."""

    checkpoint = "checkpoint"
    r_bin = "r_bin"


class ExportDtype(Enum):
    """The dtype of exported weights; `auto` is the one the run held them in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class ExportOptions:
    """What to write and where.

    Attributes:
        path: the folder to make.
        online: export although something must run that the plain model does not.
        max_shard_size: size of one file of weights, such as 5GB.
    """

    path: str = MISSING
    format: ExportFormat = ExportFormat.checkpoint
    dtype: ExportDtype = ExportDtype.auto
    online: bool = False
    max_shard_size: str = "5GB"


@dataclass(frozen=True)
class ExportConfig:
    """One export; `run` is the folder of a finished run, `plugins` the modules of your own that it may name."""

    run: str = MISSING
    plugins: list[str] = field(default_factory=list)
    export: ExportOptions = field(default_factory=ExportOptions)


def not_given(options: Any) -> Any:
    """Return a group in which no value is given, so that it changes only what is set in it, merged into another."""
    values = {option.name: getattr(options, option.name) for option in fields(options)}
    blank = {name: not_given(value) if is_dataclass(value) else MISSING for name, value in values.items()}
    return replace(options, **blank)


@dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation, of a finished run or of a model as it comes.

    What is not given is as in the run; without one it is the default, and nothing is quantized.

    Attributes:
        run: the folder of a finished run, whose model, quantizers and seed are its own.
        out: a JSON file to write.
        plugins: modules of your own that the run may name.
    """

    run: str | None = None
    out: str | None = None
    plugins: list[str] = field(default_factory=list)
    seed: int = MISSING
    model: ModelConfig = field(default_factory=lambda: not_given(ModelConfig()))
    quant: QuantConfig = field(default_factory=lambda: not_given(QuantConfig()))
    data: DataConfig = field(default_factory=lambda: not_given(DataConfig()))
    evaluation: EvaluationConfig = field(default_factory=lambda: not_given(EvaluationConfig()))
