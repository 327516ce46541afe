"""The counts of both sides are those of the products they stand for, and the cheaper one is chosen."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.products import rotate_columns, rotated_linear
from rotexp.rotation.side import LinearShape, Side, Sides, cheapest_sides, multiply_adds, weight_sides

TOKENS, WIDTH, HEAD = 10, 24, 8
ATTENTION = (LinearShape(WIDTH, 32, WIDTH), LinearShape(WIDTH, 16, WIDTH), LinearShape(WIDTH, 16, WIDTH, HEAD))
OUTPUT = (LinearShape(32, WIDTH, HEAD, WIDTH),)
DOWN = (LinearShape(40, WIDTH, 0, WIDTH),)
Linears = tuple[LinearShape, ...]


def counted(linears: Linears, sides: Sides, *, learned: bool, quantized: bool) -> int:
    """Run the linears forward, and backward if they learn, and count their multiply-adds beyond the plain ones."""
    orders = {n: torch.eye(n, requires_grad=learned) for n in (WIDTH, HEAD)}
    x = torch.randn(TOKENS, linears[0].inputs, requires_grad=learned)
    quantizer = FakeQuantizer(QuantSpec(4) if quantized else QuantSpec())
    with FlopCounterMode(display=False) as counter:
        order = linears[0].input_order
        on_tokens = sides.input is Side.tokens and order
        shared = rotate_columns(x, orders[order].mT) if on_tokens else x
        results = []
        for linear, side in zip(linears, sides.outputs, strict=True):
            before = orders.get(linear.input_order) if not on_tokens else None
            after = orders.get(linear.output_order)
            inside = after if side is Side.weight else None
            weight = torch.randn(linear.outputs, linear.inputs)
            if before is None and inside is None:
                y = F.linear(shared, weight)
            else:
                y = rotated_linear(
                    shared, weight=weight, bias=None, quantizer=quantizer, input_rotation=before, output_rotation=inside
                )
            results.append(y if after is None or inside is not None else rotate_columns(y, after))
        if learned:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])
    plain = sum(linear.outputs * linear.inputs for linear in linears) * TOKENS * (2 if learned else 1)
    return counter.get_total_flops() // 2 - plain


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("linears", [ATTENTION, OUTPUT, DOWN], ids=["attention", "output", "down"])
@pytest.mark.parametrize(("before", "after"), list(itertools.product(Side, Side)))
def test_counts_are_those_of_the_products(linears: Linears, before: Side, after: Side, learned: bool) -> None:
    sides = Sides(before, (after,) * len(linears))
    expected = counted(linears, sides, learned=learned, quantized=False)
    assert multiply_adds(linears, sides, tokens=TOKENS, learned=learned) == expected


@pytest.mark.parametrize("linears", [ATTENTION, OUTPUT, DOWN], ids=["attention", "output", "down"])
def test_kept_codes_spare_the_second_rotation(linears: Linears) -> None:
    sides = weight_sides(linears)
    expected = counted(linears, sides, learned=True, quantized=True)
    once = multiply_adds(linears, sides, tokens=TOKENS, learned=False)
    assert multiply_adds(linears, sides, tokens=TOKENS, learned=True) - once == expected


@pytest.mark.parametrize("tokens", [1, 16, 1024, 10**6])
def test_no_sides_are_cheaper_than_those_chosen(tokens: int) -> None:
    for linears in (ATTENTION, OUTPUT, DOWN):
        every = [Sides(before, after) for before in Side for after in itertools.product(Side, repeat=len(linears))]
        costs = [multiply_adds(linears, sides, tokens=tokens, learned=True) for sides in every]
        chosen = cheapest_sides(linears, tokens=tokens)
        assert multiply_adds(linears, chosen, tokens=tokens, learned=True) == min(costs)


def test_smollm2_rotates_tokens_where_outputs_are_many_and_weights_where_tokens_are() -> None:
    gate_up = (LinearShape(576, 1536, 576),) * 2
    output = (LinearShape(576, 576, 64, 576),)
    assert cheapest_sides(gate_up, tokens=4096).input is Side.tokens
    assert cheapest_sides(output, tokens=4096).outputs == (Side.weight,)
    assert cheapest_sides(output, tokens=128).outputs == (Side.tokens,)


def test_without_rotations_nothing_is_counted_and_only_rotated_outputs_are() -> None:
    bare = (LinearShape(WIDTH, 32),)
    assert multiply_adds(bare, weight_sides(bare), tokens=TOKENS, learned=True) == 0
    fused = (LinearShape(WIDTH, 32, 0, HEAD, rotated_outputs=16),)
    assert multiply_adds(fused, Sides(Side.tokens, (Side.tokens,)), tokens=TOKENS, learned=False) == TOKENS * 16 * HEAD
    assert multiply_adds(fused, weight_sides(fused), tokens=TOKENS, learned=False) == 16 * WIDTH * HEAD
