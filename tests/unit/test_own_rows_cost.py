"""What ranks do for a sharded weight, whole or each for its rows, is counted, and the cheaper way chosen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.linear_shape import LinearShape
from rotexp.rotation.own_rows.cost import ShardedShape, Work, multiply_adds_per_byte
from rotexp.rotation.products import rotated_linear

WIDTH, INNER, HEAD = 512, 1024, 64
GATE = LinearShape(WIDTH, INNER, WIDTH)
OUTPUT = LinearShape(WIDTH, WIDTH, HEAD, WIDTH)
DOWN = LinearShape(INNER, WIDTH, 0, WIDTH)


def sharded(linear: LinearShape, *, gathers: int = 2, exchanged: bool = False, per_byte: int = 500) -> ShardedShape:
    return ShardedShape(
        linear,
        ranks=4,
        replicas=1,
        gathers=gathers,
        element_bytes=4,
        scales=1,
        exchanged=exchanged,
        learned=True,
        multiply_adds_per_byte=per_byte,
    )


def test_a_reader_by_hand() -> None:
    weights = WIDTH * INNER
    assert sharded(GATE).whole() == Work(3 * weights * WIDTH, 2 * weights * 4 * 3 / 4)
    codes, gradient = 2 * (weights + 4 * INNER), 4 * weights
    assert sharded(GATE).divided() == Work(2 * weights * WIDTH / 4, (codes + gradient) * 3 / 4)


def test_replicas_reduce_what_ranks_have_reduced() -> None:
    weights = WIDTH * INNER
    more = dataclasses.replace(sharded(GATE), replicas=2).divided().received_bytes
    assert more - sharded(GATE).divided().received_bytes == 2 * 4 * weights / 4 / 2


@pytest.mark.parametrize(("linear", "numbers"), [(OUTPUT, 5), (DOWN, 4)], ids=["output", "down"])
def test_an_exchange_moves_shares_of_a_weight(linear: LinearShape, numbers: int) -> None:
    """Two there and back forward; backward the gradient and the weight it meets, and back where R acts before."""
    without, with_exchange = (sharded(linear, exchanged=exchanged).divided() for exchanged in (False, True))
    share = linear.inputs * linear.outputs * 4 / 4
    assert with_exchange.received_bytes - without.received_bytes == numbers * share * 3 / 4
    assert with_exchange.multiply_adds == without.multiply_adds


def counted(linear: LinearShape, *, keep_codes: bool) -> int:
    """Run a quantized weight forward and backward, and count its multiply-adds beyond those with tokens."""
    tokens, orders = 8, (linear.input_order, linear.output_order)
    before, after = (torch.eye(order).requires_grad_() if order else None for order in orders)
    x = torch.randn(tokens, linear.inputs, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = rotated_linear(
            x,
            weight=torch.randn(linear.outputs, linear.inputs),
            bias=None,
            quantizer=FakeQuantizer(QuantSpec(4)),
            input_rotation=before,
            output_rotation=after,
            keep_codes=keep_codes,
        )
        y.sum().backward()
    with_tokens = 3 * tokens * linear.outputs * linear.inputs  # forward, and both gradients
    return int(counter.get_total_flops()) // 2 - with_tokens


@pytest.mark.parametrize("linear", [GATE, OUTPUT, DOWN], ids=["gate", "output", "down"])
def test_products_of_whole_weights_are_those_that_are_formed(linear: LinearShape) -> None:
    """A weight that is gathered once keeps its codes; one that is gathered twice is quantized as often."""
    assert sharded(linear).whole().multiply_adds == counted(linear, keep_codes=False)
    once = sharded(linear, gathers=1)
    assert once.whole().multiply_adds == counted(linear, keep_codes=True)
    assert once.whole().multiply_adds == 4 * once.divided().multiply_adds


@pytest.mark.parametrize("per_byte", [0, 50, 500, 10**6])
def test_own_rows_gathered_twice_are_cheaper_whatever_bytes_cost(per_byte: int) -> None:
    assert sharded(GATE, per_byte=per_byte).is_cheaper_divided


def test_small_blocks_gathered_once_do_not_pay_where_bytes_are_dear() -> None:
    blocks = LinearShape(WIDTH, INNER, HEAD)
    assert not sharded(blocks, gathers=1, per_byte=500).is_cheaper_divided
    assert sharded(blocks, gathers=1, per_byte=50).is_cheaper_divided
    assert multiply_adds_per_byte("cpu") < multiply_adds_per_byte("cuda")


def test_without_learning_there_is_no_gradient_to_reduce() -> None:
    fixed = dataclasses.replace(sharded(DOWN), learned=False, linear=LinearShape(INNER, WIDTH))
    assert fixed.divided() == Work(0, 2 * (INNER * WIDTH + 4 * WIDTH) * 3 / 4)
