"""Sequences of signs whose autocorrelations cancel: stored rows, Golay pairs and the T-sequences made of them."""

import json
from functools import lru_cache
from importlib.resources import files

import torch
from torch import Tensor

_GOLAY_SEEDS = {
    1: ("+", "+"),
    2: ("++", "+-"),
    10: ("++-+-+--++", "++-+++++--"),
    26: ("++++-++--+-+-+--+-+++--+++", "++++-++--+-+++++-+---++---"),
}
"""The Golay pairs that are no product of shorter ones (M. J. E. Golay, 1961 and 1962)."""


@lru_cache(maxsize=1)
def stored() -> dict[str, dict[str, list[str]]]:
    """Read `sequences.json`: by kind and length, rows of signs, in which 0 stands for no entry.

    - `goethals_seidel`: four rows of signs whose periodic autocorrelations cancel;
    - `williamson`: the same, symmetric;
    - `t`: four rows, of which one has an entry in each place, whose periodic autocorrelations cancel.

    Those of lengths 3n - 1 = 23, 29, 35, 47, 59, 71, 77, 83, 89, 95 and 107 are made of Turyn-type sequences of length
    n: H. Kharaghani and B. Tayfeh-Rezaie, "A Hadamard matrix of order 428", Journal of Combinatorial Designs 13, 2005,
    for n = 36; D. Best, D. Ž. Đoković, H. Kharaghani and H. Ramp, "Turyn-type sequences: classification, enumeration
    and construction", same journal 21, 2013, for the others. All other rows were found by a search for this file:
    rows that are constant on the orbits of a group of multipliers of Z_n, with a power spectrum below 4n (or a sample
    of the flattest); the autocorrelations of all pairs, sorted; two pairs that cancel. Where the product of the four
    rows x, y, z, w is 1 everywhere, (x + y + z + w) / 4, (x + y - z - w) / 4, … are T-sequences.
    """
    text = (files("rotexp.orthogonal") / "sequences.json").read_text(encoding="utf-8")
    rows: dict[str, dict[str, list[str]]] = json.loads(text)
    return rows


def sign_row(signs: str) -> Tensor:
    """Return 1 for +, -1 for - and 0 for 0: (length,) int8 on the CPU."""
    return torch.tensor(["-0+".index(sign) - 1 for sign in signs], dtype=torch.int8, device="cpu")


@lru_cache(maxsize=1)
def stored_rows() -> dict[int, tuple[Tensor, ...]]:
    """Return, by length, four stored rows of signs whose periodic autocorrelations cancel; not to be written to."""
    return {int(length): tuple(map(sign_row, rows)) for length, rows in stored()["goethals_seidel"].items()}


def has_t_sequences(length: int) -> bool:
    """Tell whether `t_sequences` has the length: it is 1, stored, or a sum of lengths of two Golay pairs."""
    return length == 1 or str(length) in stored()["t"] or _golay_summand(length) is not None


def t_sequences(length: int) -> list[Tensor]:
    """Return four rows, of which exactly one has a sign in each place, whose periodic autocorrelations sum to zero.

    From Golay pairs A, B and C, D: (A + B) / 2 and (A - B) / 2, followed by (C + D) / 2 and (C - D) / 2 (R. J. Turyn,
    1974).

    Args:
        length: t, for which `has_t_sequences` holds.

    Returns:
        rows: four (t,) int8 on the CPU, entries 1, 0 and -1.
    """
    if length == 1:
        return [torch.full((1,), int(first), dtype=torch.int8, device="cpu") for first in (True, False, False, False)]
    if rows := stored()["t"].get(str(length)):
        return list(map(sign_row, rows))
    first = _golay_summand(length)
    assert first is not None, f"no T-sequences of length {length} are known here"
    (a, b), (c, d) = golay_pair(first), golay_pair(length - first)
    before, after = torch.zeros_like(a), torch.zeros_like(c)
    halves = [torch.cat([half, after]) for half in ((a + b) // 2, (a - b) // 2)]
    return halves + [torch.cat([before, half]) for half in ((c + d) // 2, (c - d) // 2)]


@lru_cache(maxsize=65536)
def _golay_summand(length: int) -> int | None:
    """Return the smallest length of a Golay pair that is one of two which add up to this length."""
    return next((first for first in range(1, length // 2 + 1) if _is_golay(first) and _is_golay(length - first)), None)


@lru_cache(maxsize=65536)
def _is_golay(length: int) -> bool:
    return length == 1 or any(length % seed == 0 and _is_golay(length // seed) for seed in (2, 10, 26))


def golay_pair(length: int) -> tuple[Tensor, Tensor]:
    """Return two rows of signs whose aperiodic autocorrelations cancel.

    Products of pairs are R. J. Turyn's ("Hadamard matrices, Baumert-Hall units, …", J. Combin. Theory A 16, 1974).

    Args:
        length: a product of powers of 2, 10 and 26.

    Returns:
        a, b: (length,) int8 on the CPU.
    """
    if length in _GOLAY_SEEDS:
        first, second = map(sign_row, _GOLAY_SEEDS[length])
        return first, second
    seed = next(seed for seed in (26, 10, 2) if length % seed == 0 and _is_golay(length // seed))
    (a, b), (c, d) = golay_pair(seed), golay_pair(length // seed)
    plus, minus = (c + d) // 2, (c - d) // 2
    return torch.kron(a, plus) + torch.kron(b.flip(0), minus), torch.kron(b, plus) - torch.kron(a.flip(0), minus)
