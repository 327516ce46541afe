"""Quantizers as a configuration names them: of integers, or of a format of the user's own."""

from __future__ import annotations

from rotexp.config.targets import made
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.quantizer import Quantizer, check_takes
from rotexp.quant.spec import QuantSpec


def fake_quantizer(spec: QuantSpec, *, key: str) -> FakeQuantizer:
    """Return the quantizer that a checked spec describes.

    Args:
        key: of the spec, for messages.

    Raises:
        ValueError: the class that `_target_` names cannot be made, is no quantizer, or cannot carry the spec out.
    """
    if spec.target is None:
        return FakeQuantizer(spec)
    quantizer: Quantizer = made(spec, key=key, protocol=Quantizer)
    check_takes(quantizer, spec, key)
    return FakeQuantizer(spec, quantizer)
