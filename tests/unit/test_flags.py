"""Each flag of each supported family's config leaves the rotated model the same, or stops a rotation by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import from_config, logits, make_token_ids, rotated
from flags import ROW, Case, cases

from rotexp.config import RotationConfig
from rotexp.rotation.invariance import relative_error

EXACT = 1e-5
PLACED: dict[str, RotationConfig] = {
    "R1": RotationConfig(r1=True, r2=False),
    "R2": RotationConfig(r1=False, r2=True),
    "all": RotationConfig(r1=None, r2=None, r3=None, r4=None),
}
"""One obstacle must not hide another."""

Row = Callable[[str, object], None]
CASES = [
    pytest.param(case, id=str(case), marks=() if case.is_switch or not case.flag else pytest.mark.slow)
    for case in cases()
]


def outcome(source: Any, rotation: RotationConfig) -> tuple[float | None, list[str]]:
    """Return the error of the rotated logits (None where the rotation is refused), and what was said."""
    token_ids = make_token_ids()
    try:
        model = rotated(source, rotation)
    except ValueError as error:
        return None, [str(error)]
    with torch.no_grad():
        original = source(token_ids, use_cache=False).logits
    return relative_error(original, logits(model, token_ids)), model.warnings


def built(config: Callable[[], Any]) -> tuple[Any, str]:
    """Return a small Hugging Face model that runs, or None and why transformers itself has none."""
    try:
        source = from_config(config())
        source(make_token_ids(), use_cache=False)
    except Exception as error:  # whatever transformers does with values that nobody uses
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    return source, ""


def check(source: Any, *, names: list[str], record: Row) -> None:
    """Check that every rotation acts and changes nothing, or is refused or left out with one of `names`."""
    kind = source.config.model_type
    for column, rotation in PLACED.items():
        error, said = outcome(source, rotation)
        record(column, "refused" if error is None else error)
        for text in said:
            record("said", text.rpartition(f"model_type={kind}: ")[2].partition("; set ")[0])
            assert any(name in text for name in names), text
        assert error is None or error <= EXACT, (column, error, said)


@pytest.mark.parametrize("case", CASES)
def test_a_flag_changes_nothing_or_is_refused_by_name(case: Case, record_property: Row) -> None:
    record_property(ROW, str(case))
    source, reason = built(case.config)
    if source is None:
        record_property("said", f"transformers: {reason}")
        assert case.flag
        return
    check(source, names=[*([case.flag] if case.flag else []), *parts_of(source)], record=record_property)


def parts_of(source: Any) -> list[str]:
    """Return what a refusal may name if not the flag: norms, the embedding, and the model's class."""
    names = {name.rpartition(".")[2] for name, _ in source.named_modules()}
    return [type(source).__name__, *(name for name in names if "norm" in name or "embed" in name)]
