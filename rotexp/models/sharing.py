"""Which parameters of a model share their memory, so that whoever changes one changes the other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are one, or views of one storage that overlap (as their first and last elements say).

    On the meta device no storage has an address; there views of one storage are told by the storage itself.
    """
    if one is other:
        return True
    (storage, start, stop), (other_storage, other_start, other_stop) = _span(one), _span(other)
    return storage == other_storage and start < other_stop and other_start < stop


def shared_parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of names of parameters that share memory, each parameter with one that begins no later.

    A module that stands in two places has its parameters under two names too.
    """
    spans: dict[object, list[tuple[int, int, str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        storage, start, stop = _span(parameter)
        spans.setdefault(storage, []).append((start, stop, name))
    for held in spans.values():
        _, reached, longest = min(held)
        for start, stop, name in sorted(held)[1:]:
            if start < reached:
                yield longest, name
            if stop > reached:
                reached, longest = stop, name


def _span(tensor: Tensor) -> tuple[object, int, int]:
    """Return a tensor's storage, and where its first element begins and its last one ends there, in bytes."""
    storage, size, first = tensor.untyped_storage(), tensor.element_size(), int(tensor.storage_offset())
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    num_spanned = 1 + sum((length - 1) * stride for length, stride in steps) if tensor.numel() else 0
    return storage.data_ptr() or ("no address", storage._cdata), first * size, (first + num_spanned) * size
