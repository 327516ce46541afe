"""Quantizers as a configuration names them: of integers, or of a format of the user's own."""

from __future__ import annotations

from rotexp.config.targets import build
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.quantizer import Quantizer, check_takes, missing_members
from rotexp.quant.spec import QuantSpec


def fake_quantizer(spec: QuantSpec, *, key: str) -> FakeQuantizer:
    """Return the quantizer that a checked spec describes.

    Args:
        key: of the spec, for messages.

    Raises:
        ValueError: the class that `_target_` names cannot be built, is no quantizer, or cannot carry the spec out.
    """
    if spec.target is None:
        return FakeQuantizer(spec)
    quantizer = _own(spec, key=key)
    check_takes(quantizer, spec, key)
    return FakeQuantizer(spec, quantizer)


def _own(spec: QuantSpec, *, key: str) -> Quantizer:
    try:
        quantizer: Quantizer = build(spec)
    except TypeError as error:
        raise ValueError(f"{key}.{spec.setting}: cannot be built ({error}); complete it or its options") from error
    if missing := missing_members(quantizer):
        raise ValueError(
            f"{key}.{spec.setting}: is no quantizer, for it lacks {', '.join(missing)}; "
            "derive it from rotexp.quant.quantizer.Quantizer"
        )
    return quantizer
