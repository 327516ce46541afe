"""What readers of one tensor share is computed once, never stale, and lets go of."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rotexp.rotation.shared_input import SharedInput


class Readers:
    """Three readers of one input, who count how often the square they share is computed."""

    def __init__(self) -> None:
        self.shared = SharedInput()
        self.numbers = {name: self.shared.join() for name in "qkv"}
        self.inputs: list[int] = []

    def __call__(self, x: Tensor, reader: str, *, kind: str = "square") -> Tensor:
        return self.shared(x, reader=self.numbers[reader], kind=kind, compute=self.square)

    def square(self, x: Tensor) -> Tensor:
        self.inputs.append(id(x))
        return x * x

    def all(self, x: Tensor) -> list[Tensor]:
        return [self(x, reader) for reader in "qkv"]


def test_one_pass_computes_once_and_the_next_anew() -> None:
    readers, x = Readers(), torch.arange(4.0)
    first, second, third = readers.all(x)
    assert first is second is third
    assert readers.all(x)[0] is not first
    assert len(readers.inputs) == 2


def test_gradients_add_up_as_if_each_had_computed_its_own() -> None:
    readers, x = Readers(), torch.arange(4.0, requires_grad=True)
    for _ in range(2):
        x.grad = None
        sum((result * factor).sum() for factor, result in enumerate(readers.all(x), 1)).backward()
        torch.testing.assert_close(x.grad, 2 * 6 * x.detach())


def test_a_reader_that_comes_again_does_not_meet_a_freed_graph() -> None:
    readers, x = Readers(), torch.arange(4.0, requires_grad=True)
    for _ in range(3):
        readers(x, "q").sum().backward()
    assert len(readers.inputs) == 3


def test_another_tensor_an_update_in_place_or_another_grad_mode_begins_anew() -> None:
    readers, x = Readers(), torch.arange(4.0)
    assert torch.equal(readers(x, "q"), x * x)
    assert torch.equal(readers(x + 1, "k"), (x + 1) ** 2)
    readers(x, "q")
    x.add_(2)
    assert torch.equal(readers(x, "k"), x * x)
    x.requires_grad_()
    with torch.no_grad():
        assert not readers(x, "q").requires_grad
    assert readers(x, "k").requires_grad


def test_kinds_do_not_mix() -> None:
    readers, x = Readers(), torch.arange(4.0)
    rotated, quantized = readers(x, "q", kind="rotated"), readers(x, "k", kind="quantized")
    assert rotated is not quantized
    assert readers(x, "v", kind="rotated") is rotated


def test_the_last_reader_and_the_death_of_the_input_let_the_result_go() -> None:
    readers, x = Readers(), torch.arange(4.0)
    results = [weakref.ref(result) for result in readers.all(x)]
    skipped = weakref.ref(readers(x, "q"))
    gc.collect()
    assert [result() for result in results] == [None] * 3
    assert skipped() is not None
    del x
    assert skipped() is None


def test_checkpointed_layers_recompute_what_they_share() -> None:
    readers, x = Readers(), torch.arange(4.0, requires_grad=True)
    checkpoint(lambda hidden: sum(readers.all(hidden * 1)), x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, 6 * x.detach())
    assert len(readers.inputs) == 2


def test_inference_tensors_are_not_shared_and_one_reader_needs_no_sharing() -> None:
    readers = Readers()
    with torch.inference_mode():
        assert len({id(result) for result in readers.all(torch.arange(4.0))}) == 3
    alone, x = SharedInput(), torch.arange(4.0)
    number = alone.join()
    results = [alone(x, reader=number, kind=0, compute=torch.square) for _ in range(2)]
    assert results[0] is not results[1]


def test_copies_share_among_themselves_and_start_empty() -> None:
    readers, x = Readers(), torch.arange(4.0)
    first = readers(x, "q")
    one, other = copy.deepcopy([readers.shared, readers.shared])
    assert one is other is not readers.shared
    assert one(x, reader=1, kind="square", compute=torch.square) is not first
    assert pickle.loads(pickle.dumps(readers.shared)).num_readers == 3
    assert readers(x, "k") is first
