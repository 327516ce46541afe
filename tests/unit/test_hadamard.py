"""Hadamard matrices, the fields behind them, random orthogonal matrices and the fast transform."""

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hadamard_checks import assert_hadamard
from torch import Tensor

from rotexp.orthogonal import hadamard as hadamard_module
from rotexp.orthogonal.galois import galois_field, prime_power
from rotexp.orthogonal.hadamard import (
    HadamardTransform,
    hadamard,
    hadamard_factors,
    hadamard_obstacle,
    is_constructible,
    largest_block,
    random_hadamard,
    random_orthogonal,
)

# Residual and down-projection widths of released models.
MODEL_ORDERS = [576, 896, 1536, 4864, 8960, 9728, 11008, 13696, 14336, 18944, 25600, 27648, 28672, 29568, 53248]
TRANSFORM_ORDERS = [1, 2, 4, 12, 20, 36, 52, 72, 92, 100, 116, 172, 188, 256, 292, 344, 428, 520, 576, 768, 1536]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("order", [344, 500, 576, 676, 1332, 1536])
def test_larger_orders_are_hadamard(order: int) -> None:
    assert_hadamard(hadamard(order))


@pytest.mark.parametrize("order", MODEL_ORDERS)
def test_model_orders_are_products_of_small_hadamard_matrices(order: int) -> None:
    factors = hadamard_factors(order)
    assert math.prod(factors) == order
    assert list(factors) == sorted(factors)
    assert max(factors) < 450
    for factor in factors:
        assert_hadamard(hadamard(factor))


@pytest.mark.parametrize("order", [4120, 8960, 13696, 18944, 25600, 29568])
def test_rows_of_large_orders_are_orthogonal_without_the_dense_matrix(order: int) -> None:
    rows = torch.tensor([0, 1, order // 3, order // 2, order - 2, order - 1])
    units = torch.zeros(len(rows), order, dtype=torch.float64)
    units[torch.arange(len(rows)), rows] = 1
    spot = HadamardTransform(order)(units) * math.sqrt(order)
    torch.testing.assert_close(spot, spot.sign(), rtol=0, atol=1e-12)
    assert torch.equal(spot.sign() @ spot.sign().T, order * torch.eye(len(rows), dtype=torch.float64))


def test_factors_are_direct_orders_and_multiply_to_the_order() -> None:
    for order in filter(is_constructible, range(1, 4097)):
        factors = hadamard_factors(order)
        assert math.prod(factors) == order
        assert order == 1 or 1 not in factors


def test_powers_of_two_are_split_into_balanced_factors() -> None:
    for exponent in range(8, 21):
        factors = hadamard_factors(2**exponent)
        assert max(factors) <= 128
        assert max(factors) <= 2 * min(factors)


def test_a_power_of_two_is_the_walsh_matrix() -> None:
    index = torch.arange(512)
    overlap = index[:, None] & index[None, :]
    parity = torch.stack([(overlap >> bit) & 1 for bit in range(9)]).sum(0) % 2
    assert torch.equal(hadamard(512), (1 - 2 * parity).to(torch.int8))


def test_paley_matrices_are_skew_or_symmetric() -> None:
    for order in (12, 20, 28, 44, 344):
        skew = hadamard(order) - torch.eye(order, dtype=torch.int8)
        assert torch.equal(skew, -skew.T)
    for order in (36, 52, 76, 100):
        assert torch.equal(hadamard(order), hadamard(order).T)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (
            30,
            "no Hadamard matrix of order 30 exists: the order must be 1, 2 or a multiple of 4 (the nearest orders are "
            "28 and 32)",
        ),
        (668, "no construction known here for order 668 (the nearest orders are 664 and 672)"),
        (1336, "no construction known here for order 1336 (the nearest orders are 1332 and 1340)"),
        (
            107,
            "no Hadamard matrix of order 107 exists: the order must be 1, 2 or a multiple of 4 (the nearest orders are "
            "104 and 108)",
        ),
        (0, "no Hadamard matrix of order 0 exists: the order must be positive"),
        (-4, "no Hadamard matrix of order -4 exists: the order must be positive"),
    ],
)
def test_a_refusal_gives_reason_and_nearest_orders(order: int, message: str) -> None:
    assert not is_constructible(order)
    assert hadamard_obstacle(order) == message
    for refuse in (
        hadamard,
        hadamard_factors,
        HadamardTransform,
        lambda order: random_hadamard(order, generator=generator(0)),
    ):
        with pytest.raises(ValueError, match=r"Hadamard matrix|construction") as caught:
            refuse(order)
        assert str(caught.value) == message


def test_what_can_be_constructed_has_no_obstacle() -> None:
    assert {hadamard_obstacle(order) for order in (1, 2, 92, 13696)} == {None}


@pytest.mark.parametrize(
    ("widths", "block"),
    [
        ((13696,), 13696),
        ((668,), 4),
        ((4096, 13696), 128),
        ((2672, 1336), 8),
        ((50,), 2),
        ((48, 50), 2),
        ((48, 35), None),
    ],
)
def test_the_largest_block_is_an_order_that_divides_all_widths(widths: tuple[int, ...], block: int | None) -> None:
    assert largest_block(*widths) == block
    fitting = [size for size in range(2, min(widths) + 1) if not any(width % size for width in widths)]
    assert block == max(filter(is_constructible, fitting), default=None)


def test_the_result_belongs_to_the_caller() -> None:
    for order in (1, 12, 36, 64, 576):
        hadamard(order).zero_()
        HadamardTransform(order).matrix().zero_()
        assert_hadamard(hadamard(order))
        ones = torch.ones(order)
        HadamardTransform(order)(ones).zero_()
        assert HadamardTransform(order)(ones).norm() == pytest.approx(math.sqrt(order))


def test_prime_power_agrees_with_a_sieve() -> None:
    composite = {one * other for one in range(2, 2000) for other in range(2, 2000 // one + 1)}
    primes = [number for number in range(2, 2001) if number not in composite]
    expected = {prime**degree: (prime, degree) for prime in primes for degree in range(1, 12)}
    assert all(prime_power(number) == expected.get(number) for number in range(-3, 2001))


@pytest.mark.parametrize("order", [3, 7, 8, 9, 25, 27, 49, 81])
def test_field_axioms(order: int) -> None:
    field = galois_field(order)
    elements = torch.arange(order)
    a, b, c = elements[:, None, None], elements[None, :, None], elements[None, None, :]
    for operation, neutral in ((field.add, 0), (field.multiply, 1)):
        assert torch.equal(operation(a, b), operation(b, a))
        assert torch.equal(operation(operation(a, b), c), operation(a, operation(b, c)))
        assert torch.equal(operation(elements, torch.tensor(neutral)), elements)
    assert torch.equal(field.multiply(a, field.add(b, c)), field.add(field.multiply(a, b), field.multiply(a, c)))
    assert torch.equal(field.add(field.subtract(a, b), b), a.expand(order, order, 1))
    products = field.multiply(elements[1:, None], elements[None, 1:])
    assert torch.equal(products.sort(dim=1).values, elements[1:].expand(order - 1, -1)), "every nonzero has an inverse"


@pytest.mark.parametrize("order", [9, 25, 27, 49])
def test_adding_one_characteristic_times_gives_zero(order: int) -> None:
    field = galois_field(order)
    total = torch.tensor(0)
    for _ in range(field.characteristic):
        total = field.add(total, torch.tensor(1))
    assert total == 0


@pytest.mark.parametrize("order", [9, 25, 27, 49, 121, 343])
def test_quadratic_character_marks_the_squares(order: int) -> None:
    field = galois_field(order)
    elements = torch.arange(order)
    squares = set(field.multiply(elements, elements).tolist())
    character = field.quadratic_character()
    assert [int(value >= 0) for value in character] == [int(element in squares) for element in range(order)]
    assert character.sum() == 0
    pairs = field.multiply(elements[:, None], elements[None, :])
    assert torch.equal(character[pairs], character[:, None] * character[None, :])


def test_a_field_needs_a_prime_power() -> None:
    with pytest.raises(ValueError, match="no finite field has order 12"):
        galois_field(12)


@pytest.mark.parametrize("order", TRANSFORM_ORDERS)
def test_transform_equals_the_dense_product(order: int) -> None:
    transform = HadamardTransform(order)
    dense = hadamard(order).double() / math.sqrt(order)
    x = torch.randn(2, 3, order, dtype=torch.float64, generator=generator(order))
    torch.testing.assert_close(transform(x), x @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform.matrix(torch.float64), dense, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("order", "blocks"), [(1, 3), (2, 5), (12, 2), (32, 18), (160, 3), (344, 2)])
def test_a_blockwise_transform_equals_the_dense_block_diagonal_product(order: int, blocks: int) -> None:
    transform = HadamardTransform(order, blocks=blocks)
    dense = torch.block_diag(*[hadamard(order).double() / math.sqrt(order)] * blocks)
    x = torch.randn(blocks * order, 3, 2, dtype=torch.float64, generator=generator(order)).permute(2, 1, 0)
    assert transform.width == blocks * order
    torch.testing.assert_close(transform(x), x @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform(x[0, 0]), x[0, 0] @ dense, rtol=0, atol=1e-12)
    torch.testing.assert_close(transform.matrix(torch.float64), dense, rtol=0, atol=1e-15)


@pytest.mark.parametrize("order", MODEL_ORDERS)
def test_norms_are_kept_and_the_gradient_multiplies_by_the_transpose(order: int) -> None:
    transform = HadamardTransform(order)
    x = torch.randn(2, order, dtype=torch.float64, generator=generator(order), requires_grad=True)
    transformed = transform(x)
    (undone,) = torch.autograd.grad(transformed, x, transformed.detach())
    torch.testing.assert_close(undone, x.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(transformed.norm(dim=-1), x.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("seed", range(8))
def test_transform_follows_the_layout_of_x(seed: int) -> None:
    order = [12, 20, 256, 560][seed % 4]
    transform = HadamardTransform(order)
    x = torch.randn(order, 3, 5, dtype=torch.float64, generator=generator(seed)).permute(2, 1, 0)
    torch.testing.assert_close(transform(x), transform(x.contiguous()), rtol=0, atol=1e-12)
    assert torch.equal(transform(x[0, 0]), transform(x[:1, :1])[0, 0])
    assert transform(x[:0]).shape == (0, 3, order)


@pytest.mark.parametrize(("order", "blocks"), [(4, 1), (20, 1), (160, 1), (272, 1), (2, 3), (12, 5), (160, 2)])
def test_gradients_of_the_transform(order: int, blocks: int) -> None:
    transform = HadamardTransform(order, blocks=blocks)
    x = torch.randn(1, transform.width, dtype=torch.float64, generator=generator(order), requires_grad=True)
    assert torch.autograd.gradcheck(transform, (x,))
    assert torch.autograd.gradgradcheck(lambda x: transform(x).square(), (x,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [64, 576, 14336])
def test_dtype_is_kept_to_its_own_precision(order: int, dtype: torch.dtype) -> None:
    transform = HadamardTransform(order)
    x = torch.randn(4, order, generator=generator(1), dtype=torch.float64).to(dtype)
    exact = transform(x.double())
    assert transform(x).dtype == dtype
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(transform(x).double(), exact, rtol=2 * epsilon, atol=10 * epsilon)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [576, 3072, 14336])
def test_narrow_types_keep_the_scale(order: int, dtype: torch.dtype) -> None:
    """Rounding 1 / sqrt(factor) into the factors would stretch every row alike."""
    transform = HadamardTransform(order)
    x = torch.randn(4, order, generator=generator(1)).to(dtype)
    exact = transform(x.double())
    stretch = (transform(x).double() * exact).sum() / exact.square().sum()
    assert abs(stretch - 1) < torch.finfo(dtype).eps / 16


def test_autocast_does_not_lower_the_precision() -> None:
    transform = HadamardTransform(576)
    x = torch.randn(2, 576, generator=generator(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(transform(x), transform(x).float())
        inside = transform(x)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, transform(x))


def test_a_first_use_in_inference_mode_leaves_training_possible() -> None:
    hadamard_module._cached_scaled_matrix.cache_clear()
    transform = HadamardTransform(20)
    with torch.inference_mode():
        transform(torch.ones(20))
    x = torch.ones(20, requires_grad=True)
    (gradient,) = torch.autograd.grad(transform(x).square().sum(), x)
    torch.testing.assert_close(gradient, 2 * torch.ones(20))


def test_nothing_of_x_is_saved_for_backward() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().nbytes())
        return tensor

    x = torch.randn(64, 576, generator=generator(0), requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        HadamardTransform(576)(x)
    assert saved
    assert max(saved) == 24 * 24 * x.element_size()


def test_the_transform_keeps_to_the_meta_device_and_to_the_default_device() -> None:
    transform = HadamardTransform(576)
    assert transform(torch.ones(2, 576, device="meta")).device.type == "meta"
    with torch.device("meta"):
        matrix = hadamard(36)
        rotation = random_orthogonal(8, generator=generator(0))
    assert matrix.device.type == rotation.device.type == "cpu"


def test_the_transform_compiles_to_one_graph() -> None:
    transform = HadamardTransform(576, blocks=2)
    x = torch.randn(2, 1152, generator=generator(0))
    compiled = torch.compile(lambda x: transform(transform(x)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), transform(transform(x)))


def test_the_transform_copies_pickles_and_is_frozen() -> None:
    transform = HadamardTransform(576, blocks=2)
    x = torch.randn(1152, generator=generator(0))
    expected = transform(x)
    for twin in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert twin == transform
        assert hash(twin) == hash(transform)
        assert torch.equal(twin(x), expected)
    assert len(pickle.dumps(transform)) < 500
    with pytest.raises(AttributeError, match="cannot assign"):
        transform.order = 4  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(2, 11), (12, 2), ()])
def test_x_must_fit_the_transform(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"x of shape .* does not fit a Hadamard transform of order 12 on a width of 12"
    ):
        HadamardTransform(12)(torch.ones(shape))


@pytest.mark.parametrize("shape", [(2, 12), (2, 48), (36, 2), (3, 12), ()])
def test_x_must_have_every_block_and_no_more(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x of shape .* of order 12 on a width of 36"):
        HadamardTransform(12, blocks=3)(torch.ones(shape))


@pytest.mark.parametrize("blocks", [0, -1])
def test_a_transform_needs_a_block(blocks: int) -> None:
    with pytest.raises(ValueError, match=f"Hadamard transform of {blocks} blocks transforms nothing"):
        HadamardTransform(12, blocks=blocks)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", [1, 12, 64, 100, 576])
def test_random_hadamard_signs_the_rows(order: int, seed: int) -> None:
    matrix = random_hadamard(order, generator=generator(seed), dtype=torch.float64)
    signs = matrix * hadamard(order) * math.sqrt(order)
    torch.testing.assert_close(signs, signs[:, :1].sign().expand(order, order), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(order, dtype=torch.float64), rtol=0, atol=1e-12)


def test_random_hadamard_signs_are_fair_and_independent_of_the_dtype() -> None:
    wide = random_hadamard(1024, generator=generator(3), dtype=torch.float64)
    narrow = random_hadamard(1024, generator=generator(3), dtype=torch.bfloat16)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(wide.sign(), narrow.double().sign())
    assert abs(wide[:, 0].sign().sum()) < 5 * math.sqrt(1024)


@pytest.mark.parametrize("draw", [random_hadamard, random_orthogonal])
def test_the_generator_alone_decides(draw: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(20, generator=generator(7))
    torch.manual_seed(1)
    source = generator(7)
    assert torch.equal(first, draw(20, generator=source))
    assert not torch.equal(first, draw(20, generator=source)), "the generator moves on"
    assert not torch.equal(first, draw(20, generator=generator(8)))
    torch.manual_seed(0)
    draw(20, generator=generator(7))
    assert torch.equal(state, torch.get_rng_state()), "the global generator is left alone"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", [1, 2, 7, 30, 107])
def test_random_orthogonal_is_orthogonal_and_contiguous(order: int, seed: int) -> None:
    matrix = random_orthogonal(order, generator=generator(seed), dtype=torch.float64)
    identity = torch.eye(order, dtype=torch.float64)
    assert matrix.is_contiguous()
    torch.testing.assert_close(matrix @ matrix.T, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix.T @ matrix, identity, rtol=0, atol=1e-12)
    narrow = random_orthogonal(order, generator=generator(seed))
    assert torch.equal(narrow, matrix.float()), "drawn in float64, then rounded"
    assert narrow.is_contiguous()


def test_random_orthogonal_is_haar() -> None:
    """Moments of the Haar measure that QR without its sign correction misses: E tr R = 0 and E (tr R)² = 1."""
    order, draws, source = 6, 4000, generator(11)
    samples = torch.stack([random_orthogonal(order, generator=source, dtype=torch.float64) for _ in range(draws)])
    traces = samples.diagonal(dim1=-2, dim2=-1).sum(-1)
    error = 4 / math.sqrt(draws)
    assert abs(traces.mean()) < error
    assert abs(traces.square().mean() - 1) < 2 * error
    assert abs(torch.linalg.det(samples).mean()) < error, "rotations and reflections in equal parts"
    assert samples.mean(dim=0).abs().max() < error
    assert (samples.square().mean(dim=0) - 1 / order).abs().max() < error
    assert abs(samples[:, 0, 0].pow(4).mean() - 3 / (order * (order + 2))) < error


def test_random_orthogonal_needs_a_positive_order() -> None:
    with pytest.raises(ValueError, match="order 0 is not positive"):
        random_orthogonal(0, generator=generator(0))
