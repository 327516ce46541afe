"""Each flag of each supported family's config leaves the rotated model the same, or stops a rotation by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import from_config, logits, make_token_ids, measure, rotated
from flags import ROW, Case, cases

from rotexp.rotation.invariance import relative_error
from rotexp.rotation.options import RotationConfig

EXACT = 1e-5
PLACED: dict[str, RotationConfig] = {
    "R1": RotationConfig(r1=True, r2=False),
    "R2": RotationConfig(r1=False, r2=True),
    "all": RotationConfig(r1=None, r2=None, r3=None, r4=None),
}
"""One obstacle must not hide another."""

GAIN = "have a gain between a writer and the residual stream"
BY_FAMILY = {
    "R1": (("gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"), GAIN),
    "R3": (("stablelm",), "StableLmForCausalLM does not look its attention up"),
}
"""What stands in a rotation's way whatever the flags are, by model type."""

BY_FLAG = (
    ("R2", "olmo clip_qkv", "clip_qkv="),
    ("R1", "opt do_layer_norm_before=False", "do_layer_norm_before=False: its norms stand behind"),
    ("R1", "opt _remove_final_layer_norm=True", "model.decoder.final_layer_norm is missing"),
    ("R1", "opt word_embed_proj_dim=16", "its embeddings (model.decoder.embed_tokens) are 16 wide"),
)
"""Which flags, or which values of them, stand in a rotation's way, and in which words; every other one does not."""

REJECTED = {
    "ministral sliding_window=None",
    "qwen3 rope_parameters=longrope of 1.0",
    "gemma rope_parameters=longrope of 1.0",
    "gemma2 rope_parameters=longrope of 1.0",
    "gemma2 sliding_window=None",
    "gemma3_text rope_parameters=longrope of 1.0",
    "gemma3_text sliding_window=None",
    "phi3 rope_parameters=linear of 1.0",
    "phi3 rope_parameters=dynamic of 1.0",
    "phi3 rope_parameters=yarn of 1.0",
    "phi3 rope_parameters=llama3 of 1.0",
    "olmo3 sliding_window=None",
    "mixtral rope_parameters=dynamic of 1.0",
    "mixtral rope_parameters=yarn of 1.0",
    "mixtral rope_parameters=longrope of 1.0",
    "qwen2_moe sliding_window=None",
    "cohere logit_scale=None",
    "cohere layer_norm_eps=None",
    "cohere2 sliding_window=None",
    "gptj n_head=12",
}
"""Values that transformers itself can build or run no model with."""

Row = Callable[[str, object], None]
CASES = [
    pytest.param(case, id=str(case), marks=() if case.is_switch or not case.flag else pytest.mark.slow)
    for case in cases()
]


def outcome(source: Any, rotation: RotationConfig) -> tuple[float | None, list[str]]:
    """Return the rotated logits' error, whole and in chunks (None: the rotation is refused), and what was said."""
    token_ids = make_token_ids()
    try:
        model = rotated(source, rotation)
    except ValueError as error:
        return None, [str(error)]
    with torch.no_grad():
        original = source(token_ids, use_cache=False).logits
    with model.mode.set(rotate=True, quantize=False):
        chunked, _ = measure(model, token_ids, lambda chunk, _rows: chunk[0])
    return max(relative_error(original, found) for found in (logits(model, token_ids), chunked)), model.warnings


def built(case: Case) -> tuple[Any, str]:
    """Return a small Hugging Face model that runs, or None and why transformers itself has none."""
    try:
        source = from_config(case.config())
        source(make_token_ids(), use_cache=False)
    except Exception as error:  # whatever transformers does with values that nobody uses
        return None, " ".join(f"{type(error).__name__}: {error}".split())
    return source, ""


def obstacles(case: Case) -> dict[str, str]:
    """Return what stands in a rotation's way, by the rotation."""
    always = {key: words for key, (types, words) in BY_FAMILY.items() if case.family in types}
    names = (str(case), f"{case.family} {case.flag}")
    return always | {key: words for key, name, words in BY_FLAG if name in names}


def check(case: Case, source: Any, *, record: Row) -> None:
    """Check that every rotation acts and changes nothing, or is refused or left out for the expected reason."""
    expected = obstacles(case)
    for column, rotation in PLACED.items():
        error, said = outcome(source, rotation)
        record(column, "refused" if error is None else error)
        for text in said:
            record("said", text.rpartition(f"model_type={case.family}: ")[2].partition("; set ")[0])
        assert (error is None) is (column in expected), said
        assert error is None or error <= EXACT, (column, error, said)
        reasons = [expected[column]] if error is None else [*expected.values()] if column == "all" else []
        assert len(said) == len(reasons)
        for text, words in zip(said, reasons, strict=True):
            assert words in text


@pytest.mark.parametrize("case", CASES)
def test_a_flag_changes_nothing_or_is_refused_for_the_reason_that_is_its_own(case: Case, record_property: Row) -> None:
    record_property(ROW, str(case))
    source, reason = built(case)
    assert (source is None) is (str(case) in REJECTED), reason
    if source is None:
        record_property("said", f"transformers: {reason}")
    else:
        check(case, source, record=record_property)


def test_every_expectation_is_about_a_case() -> None:
    names = {str(case) for case in cases()}
    flags = {f"{case.family} {case.flag}" for case in cases()}
    assert names >= REJECTED
    assert names | flags >= {name for _, name, _ in BY_FLAG}
