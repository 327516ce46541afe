"""States are gathered and spread whole; every fault of one that does not fit is named before anything is written."""

import pytest
import torch

from rotexp.sharding import state_dicts
from rotexp.sharding.communication import Communication
from rotexp.sharding.split_vector import SplitVector
from rotexp.sharding.state_dicts import Form, check_state, form, full_state, load_full_state


def state() -> dict[str, torch.Tensor | SplitVector]:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(11, generator=generator)
    return {
        "weight": torch.nn.Parameter(torch.randn(37, 3, generator=generator)),
        "count": torch.tensor(7),
        "vector": SplitVector(11, [0, 4], [vector[:4], vector[4:]]),
    }


def test_full_state_copies_and_loads_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_dicts, "WINDOW", 3)  # so that windows and pieces do not begin together
    communication, own = Communication(), state()
    full = full_state(own, communication=communication)
    assert {name: tuple(tensor.shape) for name, tensor in full.items()} == {
        "weight": (37, 3),
        "count": (),
        "vector": (11,),
    }
    kept = {name: tensor.clone() for name, tensor in full.items()}
    with torch.no_grad():
        own["weight"].zero_()
        own["count"].zero_()
        own["vector"].tensors[1].zero_()
    assert torch.equal(full["weight"], kept["weight"]), "what was gathered is a copy"
    load_full_state(own, full, communication=communication, what="x")
    again = full_state(own, communication=communication)
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert isinstance(own["weight"], torch.nn.Parameter)


def test_every_fault_is_named_in_one_line_and_nothing_is_written() -> None:
    own = state()
    full = full_state(own, communication=Communication())
    del full["count"]
    full |= {"extra": torch.zeros(2), "weight": torch.zeros(37, 4), "vector": torch.zeros(11, dtype=torch.float64)}
    before = own["weight"].detach().clone()
    with pytest.raises(ValueError, match="the average: ") as raised:
        load_full_state(own, full, communication=Communication(), what="the average")
    text = str(raised.value)
    assert "\n" not in text
    for fault in (
        "count is missing",
        "extra is unexpected",
        "weight is [37, 4] float32 instead of [37, 3] float32",
        "vector is [11] float64 instead of [11] float32",
    ):
        assert fault in text
    assert torch.equal(own["weight"], before)


def test_many_faults_are_counted() -> None:
    found = {f"x{index}": Form((1,), torch.float32) for index in range(20)}
    with pytest.raises(ValueError, match=r"x0 is unexpected.*; and 14 more"):
        check_state({}, found, communication=Communication(), what="x")


@pytest.mark.parametrize(
    ("found", "own", "fits"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (None, torch.float16, True),
    ],
)
def test_a_dtype_may_widen_but_not_lose_bits(found: torch.dtype | None, own: torch.dtype, fits: bool) -> None:
    assert Form((3,), found).fits(Form((3,), own)) is fits
    assert not Form((4,), found).fits(Form((3,), own))


def test_a_vector_of_which_this_rank_holds_nothing_has_a_shape() -> None:
    assert form(SplitVector(5, [], [])) == Form((5,), None)
