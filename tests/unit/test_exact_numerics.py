"""What `numerics=exact` refuses, and what it makes of a rank's micro-batches: their places, and one gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rotexp
from rotexp.config.targets import build
from rotexp.data.blocks import BlockSampler
from rotexp.experiment import measurements as measuring
from rotexp.experiment.measurements import Measurements
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.communication import Communication
from rotexp.training.batches import accumulation_steps, micro_batch_size
from rotexp.training.consolidation import InOrder
from rotexp.training.options import Numerics
from rotexp.training.threads import check_threads

REFUSED = {
    "train.params=all": ["train.params=all"],
    "train.params=rotations_and_norms": ["train.params=rotations_and_norms"],
    "sharding.sim_world=2": ["train.steps=0", "train.params=all", "sharding=zero2_master", "sharding.sim_world=2"],
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_added_in_one_order_is_refused_by_its_key(named: str) -> None:
    with pytest.raises(ValueError, match=r"under numerics=exact") as caught:
        rotexp.load_config(["numerics=exact", *REFUSED[named]])
    message = str(caught.value)
    assert message.startswith(f"{named}: must be ")
    assert "; set numerics=fast" in message
    assert "\n" not in message
    assert rotexp.load_config(["numerics=fast", *REFUSED[named]])


def test_it_is_a_group_whose_default_is_fast() -> None:
    assert rotexp.load_config().numerics.mode is Numerics.fast
    assert rotexp.load_config(["numerics=exact"]).numerics.exact
    assert rotexp.load_config(["numerics=exact", "train.params=rotations_and_scales"]).numerics.exact
    assert rotexp.load_config(["numerics=exact", "train.params=all", "train.steps=0"]).numerics.exact


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_micro_batch_is_one_block_in_every_world_unless_asked(world_size: int) -> None:
    asked = ["data.global_batch_size=16"]
    exact, two = (rotexp.load_config(["numerics=exact", *asked, *more]) for more in ([], ["train.micro_batch_size=2"]))
    assert [micro_batch_size(config, world_size=world_size) for config in (exact, two)] == [1, 2]
    assert [accumulation_steps(config, world_size=world_size) for config in (exact, two)] == [
        16 // world_size,
        8 // world_size,
    ]
    fast = rotexp.load_config(asked)
    assert accumulation_steps(fast, world_size=world_size) == 1


BLOCKS, BATCH = 50, 24


def parts(ranks: int, micro: int, *, first_step: int = 0) -> list[list[list[int]]]:
    """Return the micro-batches of each step in the order of their numbers: those of rank 0, then those of rank 1."""
    order = BlockSampler(
        BLOCKS,
        global_batch_size=BATCH,
        steps=9,
        seed=3,
        first_step=first_step,
        ranks=ranks,
        micro_batch_size=micro,
    )
    loaded = torch.tensor(list(order)).view(-1, BATCH // ranks // micro, ranks, micro)  # what one load gives each rank
    return loaded.transpose(1, 2).reshape(len(loaded), -1, micro).tolist()


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_micro_batches_have_the_same_blocks_and_numbers_in_every_world(ranks: int, micro: int) -> None:
    expected = parts(1, micro)
    assert parts(ranks, micro) == expected
    assert parts(ranks, micro, first_step=5) == expected[5:]
    assert len({str(step) for step in expected}) == 9


class Line(nn.Module):
    """y = a x + b, and parameters that it does not read, or only at times."""

    def __init__(self) -> None:
        super().__init__()
        self.slope, self.offset, self.unread = (nn.Parameter(torch.tensor([0.3])) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x: Tensor, *, shifted: bool) -> Tensor:
        return (self.slope * x + (self.offset * x.exp() if shifted else 0.0)).sum()


def test_gradients_of_micro_batches_are_added_as_a_tree_and_averaged() -> None:
    inputs = [torch.tensor(value) for value in (1.1, 1e-5, 7e4, 0.37, 2e-3, 5.0)]
    model = Line()
    consolidation = InOrder(model, Communication(), micro_batches=6)
    for _ in range(2):  # nothing of the first step is left in the second
        losses = []
        for index, x in enumerate(inputs):
            losses.append(model(x, shifted=index == 3))
            consolidation.backward(losses[-1])
            assert model.slope.grad is None
        loss, flag = consolidation.means(1.0)
        assert flag == 1.0
        assert torch.equal(model.slope.grad, (tree(inputs) / 6).view(1))
        assert torch.equal(model.offset.grad, (inputs[3].exp() / 6).view(1))
        assert model.unread.grad is None
        assert model.frozen.grad is None
        assert loss == (tree([value.detach() for value in losses]) / 6).item()
        model.zero_grad()  # as the optimizer does


def tree(terms: list[Tensor]) -> Tensor:
    """Return ((0 + 1) + (2 + 3)) + (4 + 5)."""
    return ((terms[0] + terms[1]) + (terms[2] + terms[3])) + (terms[4] + terms[5])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def proof(model: RotatedModel, objective: Any) -> None:
    token_ids = torch.randint(0, 61, (1, 16), generator=torch.Generator().manual_seed(0))
    check_threads(model, objective, token_ids, teacher=None, communication=Communication())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("spoiled", [None, "loss", "gradient"])
def test_a_micro_batch_that_depends_on_threads_is_refused(
    llama: Callable[..., Any], rotated: Callable[..., RotatedModel], spoiled: str | None
) -> None:
    config = rotexp.load_config()
    model = rotated(llama(), config.rotation, config.quant)
    objective = build(config.objective)

    def by_threads(*given: Any, **named: Any) -> Tensor:
        loss: Tensor = objective(*given, **named)
        part = loss if spoiled == "gradient" else loss.detach()
        bit = torch.finfo(loss.dtype).eps * (torch.get_num_threads() - 1)
        return loss + (bit * part if spoiled == "loss" else bit * (part - part.detach())) if spoiled else loss

    if spoiled is None:
        proof(model, by_threads)
    else:
        with pytest.raises(
            ValueError, match=r"^launch.threads=null: must be a number under numerics=exact .* 2 threads"
        ):
            proof(model, by_threads)
    assert torch.get_num_threads() == 2
    assert all(parameter.grad is None for parameter in model.network.parameters())


def test_one_thread_needs_no_proof(llama: Callable[..., Any], rotated: Callable[..., RotatedModel]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        proof(rotated(llama()), None)
    finally:
        torch.set_num_threads(before)


def measurements(*overrides: str, said: list[str]) -> Measurements:
    """Return those of rank 0 of 16 on 64 windows of 32 tokens."""
    ranks: Any = SimpleNamespace(rank=0, world_size=16, reduce_=lambda number, _operation="sum": number)
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=16))
    inputs: Any = SimpleNamespace(evaluation=np.zeros((64, 32), dtype=np.int64), checkpoint=model, protocol={})
    common: dict[str, Any] = {"communication": ranks, "device": torch.device("cpu"), "ranks_per_node": None}
    return Measurements(rotexp.load_config([*overrides]), inputs, **common, known={}, say=said.append)


def test_windows_are_grouped_alike_in_worlds_of_any_size() -> None:
    assert measurements("numerics=exact", said=[]).batch == 256 // 32
    assert measurements(said=[]).batch == 64 // 16
    assert measurements("numerics=exact", "evaluation.micro_batch_size=3", said=[]).batch == 3


def test_answers_that_do_not_fit_are_refused_since_how_they_are_made_would_decide_bits(
    llama: Callable[..., Any], rotated: Callable[..., RotatedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "available_bytes", lambda: 1)
    model, said = rotated(llama()), list[str]()
    with pytest.raises(
        ValueError, match=r"^numerics=exact: must be fast where .* GiB free; lower evaluation.max_windows"
    ):
        measurements("numerics=exact", said=said)._answers(model)
    assert said == []
    assert not measurements(said=said)._answers(model).kept
    assert "runs anew for every row" in said[0]
