"""Closed forms of a step's peak memory, and the bytes autograd really keeps, to compare them with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.flops import layer_weights
from rotexp.rotation.readout import chunk_rows

FLOAT32_BYTES = 4
LOSS_COPIES_BYTES = 8
"""A logit's two float32 copies in cross entropy: its log-probability and its gradient."""


def weight_bytes(shape: dict[str, int], *, itemsize: int) -> int:
    """Return what the weights of an untied Llama take.

    Args:
        shape: a Llama's sizes, named as in its Hugging Face config.
        itemsize: bytes of one weight.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    norms = (2 * layers + 1) * hidden
    return itemsize * (layers * layer_weights(shape) + 2 * shape["vocab_size"] * hidden + norms)


def kept_bytes(shape: dict[str, int], *, tokens: int, itemsize: int) -> int:
    """Return what autograd keeps of a frozen Llama's layers between forward and backward, at least.

    By token and layer: both norms' input in float32 (where the model is float32 that of the layer before, so once) and
    its inverse length; queries, keys, values and output of the attention, keys and values repeated over the heads that
    share them, and the logarithm of its sums; the gate, its activation and the up projection. Frozen weights need no
    input kept.

    Args:
        tokens: of the whole batch.
        itemsize: bytes of one activation.
    """
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    norms = 2 * (hidden * FLOAT32_BYTES + FLOAT32_BYTES)
    attention = 4 * hidden * itemsize + heads * FLOAT32_BYTES
    gated = 3 * shape["intermediate_size"] * itemsize
    return tokens * shape["num_hidden_layers"] * (norms + attention + gated)


def limit_peak_bytes(shape: dict[str, int], *, tokens: int, itemsize: int) -> int:
    """Return the peak of plain forward and backward: weights, what is kept, and the logits within the loss."""
    logits = tokens * shape["vocab_size"] * (itemsize + LOSS_COPIES_BYTES)
    kept = kept_bytes(shape, tokens=tokens, itemsize=itemsize)
    return weight_bytes(shape, itemsize=itemsize) + kept + logits


def rotated_peak_bytes(
    shape: dict[str, int], *, tokens: int, itemsize: int, quantized_weights: bool, coded_inputs: bool = False
) -> int:
    """Return the least peak of a step that trains R1 and R2, the loss being computed in chunks of tokens.

    On top of weights, of what the limit keeps and of the logits of one chunk: each rotation, its gradient and its
    successor; and by token and layer what the rotations' gradients need. Where weights are rotated, that is every
    distinct input of a weight. Where inputs are only quantized in a rotated basis, it is the errors, in float32, of two
    of the residual stream's width and of the heads' output, less the input of the first norm, before which nothing is
    trained.

    Args:
        quantized_weights: whether weights are rotated.
        coded_inputs: whether their inputs are kept as codes of a byte.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    head = hidden // shape["num_attention_heads"]
    bank = 3 * FLOAT32_BYTES * (hidden**2 + layers * head**2)
    if quantized_weights:
        width = 1 if coded_inputs else itemsize
        inputs = tokens * layers * (3 * hidden + shape["intermediate_size"]) * width
    else:
        inputs = tokens * (3 * layers - 1) * hidden * FLOAT32_BYTES
    kept = kept_bytes(shape, tokens=tokens, itemsize=itemsize)
    return weight_bytes(shape, itemsize=itemsize) + kept + _chunk_bytes(shape, tokens, itemsize) + bank + inputs


def _chunk_bytes(shape: dict[str, int], tokens: int, itemsize: int) -> int:
    """Return what the logits of a chunk take: in float32, and in the dtype of the model where that is another."""
    logits = min(tokens, chunk_rows(shape["vocab_size"])) * shape["vocab_size"]
    return logits * (FLOAT32_BYTES if itemsize == FLOAT32_BYTES else FLOAT32_BYTES + itemsize)


def count_kept_bytes(forward: Callable[[], Tensor], *, parameters: list[Tensor]) -> int:
    """Return how many bytes of memory autograd keeps after a forward, parameters and their views left out."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        held.append(tensor)  # so that no address is used twice
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())
