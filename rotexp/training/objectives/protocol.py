"""What a training objective is, rotexp's own or the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor

from rotexp.rotation.model import RotatedModel

Teacher = Callable[[Tensor], Tensor]
"""Maps token ids (batch, tokens) to the float model's logits (batch, tokens, vocabulary)."""


class Objective(Protocol):
    """A loss of a batch of blocks, made of its options; `rotexp.testing.check_objective` tries one.

    Attributes:
        distills: whether it asks the teacher, or the float model, for its logits.
    """

    distills: ClassVar[bool]

    def __call__(self, model: RotatedModel, token_ids: Tensor, *, teacher: Teacher | None = None) -> Tensor:
        """Return the mean loss in nats, a scalar with a gradient, and leave the model as it is.

        Args:
            model: rotated and quantized; `model.logits(token_ids)` is (batch, tokens, vocabulary).
            token_ids: (batch, tokens), a part of the global batch; losses of equal parts are averaged.
            teacher: the float model as it was, given where `distills` says so and training changes its weights; where
                it is None, the model with rotation and quantization switched off is the float model.
        """
        ...
