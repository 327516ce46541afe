"""Which orders the constructions reach, that they are Hadamard matrices, and the sequences that they are made of."""

import hashlib
import math
from pathlib import Path

import pytest
import torch
from hadamard_checks import assert_hadamard
from torch import Tensor

from rotexp.orthogonal.goethals_seidel import four_sequences, has_goethals_seidel
from rotexp.orthogonal.hadamard import hadamard, hadamard_factors, is_constructible
from rotexp.orthogonal.paley import conference_matrix
from rotexp.orthogonal.recursive import agayan_sarukhanyan, miyamoto
from rotexp.orthogonal.sequences import golay_pair, has_t_sequences, sign_row, stored, t_sequences
from rotexp.orthogonal.williamson import has_williamson, williamson_rows

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"

# Orders that need a construction beyond Sylvester's and Paley's, some for each, and their factors.
NEW_ORDERS = {
    764: (764,),
    172: (172,),
    428: (428,),
    188: (188,),
    260: (260,),
    92: (92,),
    156: (156,),
    292: (292,),
    184: (184,),
    436: (436,),
    520: (2, 260),
    4120: (4120,),
    13696: (32, 428),
}

# SHA-256 of the bytes of matrices that seeds published before other constructions came refer to.
DIGESTS = {
    12: "db7478025ce74776a8a2669368885b71737288dabf1e23985366a367b4f78ab9",
    20: "d04b560308676ee7cb59dd0f11653ead6c5f5efcbe97f1b57fe11bd39ee46faa",
    28: "75a65a7aa5dd6380e710e01d7e05676762da4482aba6850bccc9516666c2c3f7",
    36: "1a7aed2f42a8c71de2ae13e765a6df2c2023519ef899b00d5d0baa7ee26f341b",
    64: "4be469934f00a70b701ba4d1d2f489d817feb9fce017ad0decb3433bb851aae0",
    576: "284f140b5d351b70fd281a260cac3dfb13f3799b92dd5636b5a523cd97112df8",
    1536: "667dd297b22febdfec77c2b914564290e4eae2e6fd56b38491e7ffb3b0969a68",
}


def orders_of_sylvester_and_paley(limit: int) -> set[int]:
    """Sieve the prime powers and apply the theorems of Sylvester and Paley."""
    primes = [number for number in range(2, limit) if all(number % divisor for divisor in range(2, number))]
    fields = {prime**degree for prime in primes for degree in range(1, limit.bit_length()) if prime**degree < limit}
    paley = {q + 1 for q in fields if q % 4 == 3} | {2 * (q + 1) for q in fields if q % 4 == 1}
    return paley | {2**exponent for exponent in range(limit.bit_length())}


def products(direct: set[int], limit: int) -> set[int]:
    """Close a set of orders under products."""
    reached = {1}
    while True:
        larger = reached | {one * other for one in reached for other in direct if one * other <= limit}
        if larger == reached:
            return reached
        reached = larger


def test_every_multiple_of_4_below_668_is_hadamard() -> None:
    for order in (1, 2, *range(4, 668, 4)):
        assert_hadamard(hadamard(order))


@pytest.mark.parametrize("order", NEW_ORDERS)
def test_each_construction_is_used(order: int) -> None:
    assert hadamard_factors(order) == NEW_ORDERS[order]
    if order < 1000:
        assert_hadamard(hadamard(order))


@pytest.mark.parametrize("order", DIGESTS)
def test_the_matrices_of_published_seeds_stay(order: int) -> None:
    assert hashlib.sha256(hadamard(order).numpy().tobytes()).hexdigest() == DIGESTS[order]


def test_products_of_sylvester_and_paley_keep_to_their_factors() -> None:
    """Other constructions serve only orders that have none of these: seeds and figures refer to the old matrices."""
    direct = orders_of_sylvester_and_paley(2000)
    for order in products(direct, 2000):
        assert direct.issuperset(hadamard_factors(order)), order


def test_the_page_of_limits_tells_which_orders_are_reached() -> None:
    missing = [order for order in range(4, 32769, 4) if not is_constructible(order)]
    *first, last, after = missing[:5]
    assert [order for order in range(-8, after) if is_constructible(order)] == [
        1,
        2,
        *sorted({*range(4, after, 4)} - {*first, last}),
    ]
    text = " ".join(LIMITS.read_text(encoding="utf-8").split())
    assert f"of the 8192 multiples of 4 up to 32768, {8192 - len(missing)} are reached" in text
    assert f"all up to {after - 4} but {', '.join(map(str, first))} and {last}" in text


def autocorrelation(rows: list[Tensor]) -> Tensor:
    """Sum the periodic autocorrelations of rows, by shifting them, in integers."""
    shifts = range(len(rows[0]))
    return torch.stack([sum((row.long() * row.long().roll(shift)).sum() for row in rows) for shift in shifts])


@pytest.mark.parametrize("kind", ["goethals_seidel", "williamson", "t"])
def test_stored_rows_are_what_they_are_called(kind: str) -> None:
    for length, texts in stored()[kind].items():
        rows = list(map(sign_row, texts))
        assert [len(row) for row in rows] == [int(length)] * 4
        assert autocorrelation(rows)[1:].count_nonzero() == 0, length
        entries = torch.stack(rows).abs().sum(0)
        assert torch.equal(entries, torch.full_like(entries, 1 if kind == "t" else 4))
        assert kind != "williamson" or all(torch.equal(row[1:], row[1:].flip(0)) for row in rows)
        assert has_goethals_seidel(4 * int(length))


def test_sequences_cancel() -> None:
    for length in filter(has_t_sequences, range(1, 300)):
        rows = t_sequences(length)
        assert autocorrelation(rows).tolist() == [length] + [0] * (length - 1)
        assert torch.equal(torch.stack(rows).abs().sum(0), torch.ones(length, dtype=torch.int64))
    for length in filter(has_williamson, range(1, 120)):
        rows = williamson_rows(length)
        assert autocorrelation(rows).tolist() == [4 * length] + [0] * (length - 1)
        assert all(
            torch.equal(row[1:], row[1:].flip(0)) and torch.equal(row.abs(), torch.ones_like(row)) for row in rows
        )


@pytest.mark.parametrize("length", [1, 2, 8, 10, 20, 26, 52, 100, 260, 676])
def test_golay_pairs_cancel_without_wrapping_around(length: int) -> None:
    padded = [torch.cat([row, torch.zeros_like(row)]) for row in golay_pair(length)]
    assert autocorrelation(padded).tolist() == [2 * length] + [0] * (2 * length - 1)
    assert all(torch.equal(row.abs(), torch.ones_like(row)) for row in golay_pair(length))


@pytest.mark.parametrize("q", [5, 9, 25, 29, 37])
def test_miyamoto_is_hadamard_for_primes_and_their_powers(q: int) -> None:
    assert_hadamard(miyamoto(conference_matrix(q + 1), hadamard(q - 1)))


@pytest.mark.parametrize(("left", "right"), [(4, 4), (12, 20), (28, 12), (92, 12)])
def test_the_halved_product_is_hadamard(left: int, right: int) -> None:
    product = agayan_sarukhanyan(hadamard(left), hadamard(right))
    assert product.shape[0] == left * right // 2
    assert_hadamard(product)


def test_four_sequences_multiply_to_the_length() -> None:
    assert four_sequences(153) == (17, 9)
    assert four_sequences(167) is None
    for length in range(1, 200):
        split = four_sequences(length)
        assert split is None or (has_t_sequences(split[0]) and has_williamson(split[1]) and math.prod(split) == length)
