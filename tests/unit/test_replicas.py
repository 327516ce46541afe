"""The digest of a tensor differs when any bit of any number does, whatever its dtype, shape and place in memory."""

from __future__ import annotations

import pytest
import torch

from rotexp.sharding import replicas
from rotexp.sharding.communication import Communication
from rotexp.sharding.replicas import WORDS, Divergence, bit_digest, compare

SHAPES = [(), (1,), (7, 5), (3, 16, 16), (4 * WORDS + 3,), (2 * WORDS,)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_any_flipped_bit_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = drawn(shape, dtype)
    before = bit_digest(tensor)
    assert torch.equal(bit_digest(tensor.clone()), before)
    single = tensor.reshape(-1).view(torch.uint8)
    for position in {0, len(single) // 2, len(single) - 1}:
        for bit in (1, 128):
            single[position] ^= bit
            assert not torch.equal(bit_digest(tensor), before), (position, bit)
            single[position] ^= bit
    assert torch.equal(bit_digest(tensor), before)


def test_moved_numbers_are_seen() -> None:
    """Also where sums of rows or of columns stay what they were."""
    tensor = drawn((3 * WORDS, 4), torch.float32)
    digests = {bit_digest(tensor).item()}
    for permuted in (tensor.flip(0), tensor.flip(1), tensor.roll(2 * WORDS), tensor.roll(1, 1), tensor.roll(1)):
        digests.add(bit_digest(permuted).item())
    assert len(digests) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", [48, 64, 96, 128, 256, 576])
def test_a_column_or_row_of_another_sign_is_seen(order: int, dtype: torch.dtype) -> None:
    """Signs may be the highest bits of 8 bytes, of which even numbers cancel in a plain sum modulo 2⁶⁴."""
    matrix = drawn((order, order), dtype)
    before = bit_digest(matrix).item()
    for place in {0, 1, 2, 3, order // 2 + 1, order - 1}:
        for view in (matrix[place], matrix[:, place]):
            view.neg_()
            assert bit_digest(matrix).item() != before, place
            view.neg_()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_digest_is_its_formula(shape: tuple[int, ...]) -> None:
    """Sums of 8 bytes times odd numbers in rows, whose high half is spread over the low, summed times odd numbers."""
    single = drawn(shape, torch.float32).numpy().tobytes()
    rows = [single[start : start + 8 * WORDS].ljust(8 * WORDS, b"\0") for start in range(0, len(single) + 1, 8 * WORDS)]
    total = 0
    for number, row in enumerate(rows):
        words = [int.from_bytes(row[start : start + 8], "little") for start in range(0, len(row), 8)]
        row_sum = sum(word * (2 * place + 1) for place, word in enumerate(words)) % 2**64
        total += (row_sum ^ row_sum >> 32) * (2 * WORDS * number + 1)
    assert bit_digest(drawn(shape, torch.float32)).item() % 2**64 == total % 2**64


def test_rows_add_up_alike_where_integers_have_no_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHUNK_ELEMENTS", 3 * WORDS)
    words = drawn((11, WORDS), torch.float64).view(torch.int64)
    odd = torch.arange(1, 2 * WORDS, 2)
    assert torch.equal(replicas._row_sums_in_parts(words, odd), words @ odd)


def test_a_view_has_the_digest_of_its_copy() -> None:
    tensor = drawn((100, 33), torch.float32)
    for view in (tensor[1:], tensor[:, 1:], tensor.mT, tensor.reshape(-1)[1:]):
        assert torch.equal(bit_digest(view), bit_digest(view.clone(memory_format=torch.contiguous_format)))
    assert bit_digest(tensor[:0]).item() == 0


def test_one_rank_alone_has_no_replicas() -> None:
    assert compare({"weight": torch.ones(3)}, communication=Communication()) == Divergence()


def test_a_long_list_of_names_is_cut() -> None:
    found = Divergence({f"layer.{index}": float(index) for index in range(9)}, ranks=(1, 3))
    assert found.max_abs_diff == 8.0
    assert found.line() == (
        "layer.0, layer.1, layer.2, layer.3, layer.4, layer.5 and 3 more differ from the first replica's on rank 1, 3 "
        "by up to 8.0e+00"
    )
