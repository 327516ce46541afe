"""Floating-point operations: counted as torch's dispatcher sees them, and as the arithmetic demands them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

ATTENTION_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu{}",
    "_scaled_dot_product_flash_attention{}",
    "_scaled_dot_product_efficient_attention{}",
    "_scaled_dot_product_cudnn_attention{}",
)

LANCZOS_PRODUCTS = 32
POWER_SQUARINGS = 10


@dataclass(frozen=True)
class Operations:
    """What one call takes, in multiplications and additions.

    Attributes:
        floating: of products, convolutions and attention in floating point.
        integer: of products of int8, several of which stand for one in floating point, at a fraction of its time.
    """

    floating: int
    integer: int


def count_operations(run: Callable[[], object]) -> Operations:
    """Return the operations of one call, forward and backward.

    Elementwise work and linear solves are not in it (torch counts neither); see `cayley_flops` for the latter.
    """
    integers = []

    def product(a: Any, b: Any, **_: Any) -> int:
        integers.append(2 * a[0] * a[1] * b[1])
        return 0

    mapping = _attention() | {torch.ops.aten._int_mm: product}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    return Operations(int(counter.get_total_flops()), sum(integers))


def count_flops(run: Callable[[], object]) -> int:
    """Return the floating-point operations of one call, as `count_operations` does."""
    return count_operations(run).floating


def _attention() -> dict[Any, Any]:
    """Return the rules for fused attention: torch has none for the CPU's, and its own refuse shared keys and values."""
    mapping = {}
    for kernel, (suffix, products) in itertools.product(ATTENTION_KERNELS, (("", 2), ("_backward", 5))):
        operation = getattr(torch.ops.aten, kernel.format(suffix), None)
        if operation is not None:
            mapping[operation] = _attention_rule(products, query=1 if suffix else 0)
    return mapping


def _attention_rule(products: int, *, query: int) -> Callable[..., int]:
    """Count matrix products over all pairs of queries and keys: causal masks are not deducted, as in torch's rules."""

    def rule(*shapes: Any, **_: Any) -> int:
        batch, heads, queries, width = shapes[query]
        keys = shapes[query + 1][-2]
        return int(products * 2 * batch * heads * queries * keys * width)

    return rule


def attention_flops(*, tokens: int, batch: int, heads: int, head_dim: int) -> int:
    """Return what attention demands of forward and backward over every pair of tokens: seven products."""
    return 7 * 2 * batch * heads * tokens * tokens * head_dim


def limit_flops(shape: dict[str, int], *, tokens: int, batch: int) -> int:
    """Return what forward and backward of a frozen Llama demand, weights without gradients.

    Every weight is multiplied once forward and once backward (the input's gradient); attention comes on top.

    Args:
        shape: a Llama's sizes, named as in its Hugging Face config.
        tokens: of one block; `batch` such blocks.
    """
    weights = shape["num_hidden_layers"] * layer_weights(shape) + shape["hidden_size"] * shape["vocab_size"]
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    pairs = attention_flops(tokens=tokens, batch=batch, heads=shape["num_attention_heads"], head_dim=head_dim)
    return 2 * 2 * batch * tokens * weights + shape["num_hidden_layers"] * pairs


def layer_weights(shape: dict[str, int]) -> int:
    """Return how many weights the linears of one Llama layer have."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    keys = hidden // heads * shape["num_key_value_heads"]
    return hidden * (2 * hidden + 2 * keys + 3 * shape["intermediate_size"])


def cayley_flops(order: int, *, count: int = 1) -> int:
    """Return what one exact Cayley step of `count` rotations demands, to the leading order.

    The generator's product 2n³, the elimination 2n³/3, the solution for n right-hand sides 2n³, and the products of
    the Lanczos estimate of the norm. By products alone (`rotexp.orthogonal.elimination`) torch counts a little more:
    inverses of pivots.
    """
    estimate = LANCZOS_PRODUCTS * 2 * order**2 + POWER_SQUARINGS * 2 * (LANCZOS_PRODUCTS // 2) ** 3
    return count * (2 * order**3 + 2 * order**3 // 3 + 2 * order**3 + estimate)


def rotation_flops(shape: dict[str, int], *, tokens: int, quantized_weights: bool) -> int:
    """Return what R1 and R2 add to `limit_flops` at least.

    Quantized weights must be rotated themselves: one product forward and one for the rotation's gradient; embedding and
    head, which are not quantized, or their tokens, whichever is cheaper. Where no weight is quantized, only inputs are
    rotated, to be quantized.

    Args:
        tokens: of the whole batch.
    """
    hidden, intermediate = shape["hidden_size"], shape["intermediate_size"]
    width = hidden // shape["num_attention_heads"]
    keys = width * shape["num_key_value_heads"]
    attention, mlp = hidden + 2 * keys, 2 * intermediate  # outputs of what reads the residual stream
    if not quantized_weights:
        inputs = ((hidden * hidden, attention), (hidden * hidden, mlp), (hidden * width, hidden))
        return shape["num_hidden_layers"] * sum(_input(size, outputs, tokens) for size, outputs in inputs)
    residual = (attention, mlp, hidden, intermediate)  # and what attention and MLP write
    head = ((keys, hidden), (hidden, hidden))  # values and output, by head
    layer = sum(2 * 2 * vectors * hidden * hidden for vectors in residual)
    layer += sum(2 * 2 * vectors * features * width for features, vectors in head)
    ends = 2 * min(2 * 2 * shape["vocab_size"], 3 * 2 * tokens) * hidden * hidden
    return shape["num_hidden_layers"] * layer + ends


def _input(multiplications: int, outputs: int, tokens: int) -> int:
    """Return the cost of quantizing an input in a rotated basis, by so many multiplications a token.

    The input is rotated, and its errors times the gradient are the rotation's. In between either the errors are rotated
    back or, if its outputs are fewer than tokens, the weight is rotated, whose own gradient nobody needs.
    """
    return 2 * (2 * tokens + min(tokens, outputs)) * multiplications
