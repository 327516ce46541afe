"""The options of a model: where it comes from, and the dtype its weights are held in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rotexp.errors.requirements import MISSING, require


class ModelSource(Enum):
    """Where a model's structure and weights come from."""

    tiny = "tiny"
    hf = "hf"
    gguf = "gguf"
    random = "random"


class ModelDtype(Enum):
    """The dtype a model's weights are held in; `auto` is the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Attributes:
        name: what tables and W&B call the option that was chosen.
        source: where structure and weights come from: the shipped model, a checkpoint, a GGUF file, or at random.
        path: a hub id, a folder, or one file of safetensors, torch tensors (config.json beside them) or GGUF.
        revision: a branch, tag or commit of the hub (None: its main branch); what a run resolves is the commit.
        size: the shape of a random model.
        dtype: what its weights are held in; `auto` is the checkpoint's own.
    """

    name: str = MISSING
    source: ModelSource = MISSING
    path: str | None = None
    revision: str | None = None
    size: str | None = None
    dtype: ModelDtype = ModelDtype.float32

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        if self.source is ModelSource.hf:
            require(bool(self.path), "model.path", self.path, "a hub id or a folder", "set model.path=DIR_OR_HUB_ID")
        if self.source in (ModelSource.tiny, ModelSource.random):
            remedy = f"set model=hf model.path={self.path} to run that model"
            require(self.path is None, "model.path", self.path, f"null for model={self.name}", remedy)
        if self.source is not ModelSource.hf:
            allowed = f"null for model={self.name}, which is not fetched from the hub"
            require(self.revision is None, "model.revision", self.revision, allowed, "leave it out")
        if self.source is ModelSource.random:
            sizes = "nano, 135m, 360m, 1b, 3b, 8b, 70b"
            require(self.size in sizes.split(", "), "model.size", self.size, f"one of {sizes}", "set model.size=…")
