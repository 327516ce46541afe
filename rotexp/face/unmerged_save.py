"""Warn when a placed model is saved the Hugging Face way before its rotations are merged."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from rotexp.rotation.bank import RotationBank


class UnmergedSave:
    """In place of a network's `save_pretrained`: what it writes is loaded without rotations, unless they are merged.

    Copied with the network, unlike a closure.
    """

    def __init__(self, network: nn.Module, bank: RotationBank) -> None:
        self._network = network
        self._bank = bank

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Save as the network's class does, with a warning while there are rotations."""
        if len(self._bank):
            warnings.warn(
                "save_pretrained: rotation_bank.* is written, which transformers drops when it loads the model; call "
                "rotexp.merge(placed) before, or keep placed.network.state_dict()",
                stacklevel=2,
            )
        kind: Any = type(self._network)
        return kind.save_pretrained(self._network, *arguments, **options)
