"""What is read of a model in chunks is what its whole logits say, in every family, mode and age of states."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from families import FAMILIES, VOCABULARY, logits, make_source, make_token_ids, measure, rotated, wanted
from torch import Tensor

from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation import readout
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.readout import FinalStates, final_states

EXACT = 1e-5
ASYMMETRIC = QuantSpec(4, symmetric=False)
QUANTS = {
    "w4a4": QuantConfig(weights=QuantSpec(4), activations=ASYMMETRIC),
    "w16a4": QuantConfig(activations=ASYMMETRIC),
}
"""Rotations turn what flows, and act within the quantizers of inputs."""
ROWS = 7
"""Tokens of a chunk, of which the last of these batches has fewer."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout, "CHUNK_BYTES", 4 * VOCABULARY * ROWS)


def itself(chunk: Sequence[Tensor], _rows: slice) -> Tensor:
    """Return the logits of all states, one behind the other."""
    return torch.cat(list(chunk), dim=-1)


def read(
    model: RotatedModel, token_ids: Tensor, *, rotate: bool, beside: Sequence[FinalStates] = ()
) -> tuple[list[Tensor], FinalStates]:
    """Return the logits of the model as the mode says, those of states beside, and the model's states."""
    with model.mode.set(rotate=rotate, quantize=False):
        found, states = measure(model, token_ids, itself, beside=beside)
    return list(torch.split(found, VOCABULARY, dim=-1)), states


@pytest.mark.parametrize("name", FAMILIES)
def test_states_of_every_age_give_the_logits_of_the_model_as_it_is(name: str) -> None:
    token_ids, errors = make_token_ids(), {}
    kept: list[FinalStates] = []
    model = rotated(make_source(name), wanted(name, "all"), ready=False)
    for age, rotate in (("placed", False), ("prepared", False), ("rotated", True), ("merged", True)):
        if age == "prepared":
            prepare(model)
        if age == "merged":
            kept = kept[:-1]  # a merged model has forgotten what the bank's basis was
            merge(model)
        found, states = read(model, token_ids, rotate=rotate, beside=kept)
        expected = logits(model, token_ids, rotate=rotate)
        errors[age] = [relative_error(expected, each) for each in found]
        kept.append(states)
    assert {age: len(found) for age, found in errors.items()} == {"placed": 1, "prepared": 2, "rotated": 3, "merged": 3}
    assert max(max(found) for found in errors.values()) <= EXACT, errors


@pytest.mark.parametrize("name", FAMILIES)
def test_a_quantized_network_is_read_as_it_answers(name: str) -> None:
    token_ids, errors = make_token_ids(), {}
    for kind, quant in QUANTS.items():
        model = rotated(make_source(name), wanted(name, "all"), quant)
        with model.mode.set(rotate=True, quantize=True):
            found = measure(model, token_ids, itself)[0]
        errors[kind] = relative_error(logits(model, token_ids, quantize=True), found)
    assert max(errors.values()) <= EXACT, errors


def test_a_chunk_holds_one_token_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    assert readout.chunk_rows(VOCABULARY) == ROWS
    monkeypatch.setattr(readout, "CHUNK_BYTES", 1)
    assert readout.chunk_rows(VOCABULARY) == 1


def test_final_states_are_those_that_are_measured() -> None:
    model, token_ids = rotated(make_source("llama")), make_token_ids()
    with model.mode.set(rotate=True, quantize=True):
        found, expected = final_states(model, token_ids), measure(model, token_ids, itself)[1]
    assert torch.equal(found.values, expected.values)
    assert found.rotated
    assert expected.rotated


@pytest.mark.parametrize("name", ["llama", "gemma2 with binding caps"])
def test_any_number_of_chunks_gives_the_same_figures_but_for_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, token_ids = rotated(make_source(name), wanted(name, "all")), make_token_ids()
    whole = logits(model, token_ids).double()
    for rows in (1, 3, ROWS, 1000):
        monkeypatch.setattr(readout, "CHUNK_BYTES", 4 * VOCABULARY * rows)
        found, _ = read(model, token_ids, rotate=True)
        assert relative_error(whole, found[0].double()) <= EXACT
