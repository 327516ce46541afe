"""A block-diagonal rotation acts as its dense matrix does, and is trained and measured as its blocks are one by one."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from rotexp.metrics.rotations import rotation_metrics
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.orthogonal import stiefel
from rotexp.orthogonal.hadamard import hadamard
from rotexp.rotation.bank import Rotation, RotationBank, draw
from rotexp.sharding.replicas import bit_digest

SHAPES = [(1, 4), (2, 4), (3, 5), (4, 12)]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def orthogonal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rotation: Tensor = torch.linalg.qr(normal(*shape, seed=seed))[0]
    return rotation.contiguous().to(dtype)


def handle(blocks: Tensor) -> Rotation:
    return RotationBank().add("R1", blocks)


@pytest.mark.parametrize(("blocks", "order"), SHAPES)
def test_a_handle_multiplies_by_the_dense_block_diagonal_matrix(blocks: int, order: int) -> None:
    matrix, width = orthogonal(blocks, order, order), blocks * order
    rotation, dense = handle(matrix), torch.block_diag(*matrix)
    tokens, weight, bias = normal(2, 3, width), normal(width, 7, seed=1), normal(width, seed=2)
    exact: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
    torch.testing.assert_close(rotation.rotate(tokens), tokens @ dense, **exact)
    torch.testing.assert_close(rotation.unrotate(tokens), tokens @ dense.T, **exact)
    torch.testing.assert_close(rotation.unrotate(rotation.rotate(tokens)), tokens, **exact)
    torch.testing.assert_close(rotation.rotate_rows(weight), dense.T @ weight, **exact)
    torch.testing.assert_close(rotation.rotate_rows(bias), dense.T @ bias, **exact)
    torch.testing.assert_close(rotation.rotate(weight.T), weight.T @ dense, **exact)
    torch.testing.assert_close(rotation.rotate(tokens[0, 0]), tokens[0, 0] @ dense, **exact)


@pytest.mark.parametrize(("blocks", "order"), SHAPES)
@pytest.mark.parametrize("use", ["rotate", "unrotate", "rotate_rows"])
def test_gradients_reach_the_blocks_and_what_they_turn(use: str, blocks: int, order: int) -> None:
    width = blocks * order
    values = normal(width, width, seed=1).requires_grad_()
    rotation = handle(orthogonal(blocks, order, order))
    dense = torch.block_diag(*rotation.matrix.detach()).requires_grad_()
    expected = {"rotate": values @ dense, "unrotate": values @ dense.T, "rotate_rows": dense.T @ values}[use]
    weights = normal(width, width, seed=2)
    of_values, of_dense = torch.autograd.grad((expected.tanh() * weights).sum(), (values, dense))
    turned = getattr(rotation, use)(values)
    ours = torch.autograd.grad((turned.tanh() * weights).sum(), (values, rotation.matrix))
    diagonal = of_dense.unflatten(0, (blocks, order)).unflatten(2, (blocks, order)).diagonal(dim1=0, dim2=2)
    torch.testing.assert_close(ours[0], of_values)
    torch.testing.assert_close(ours[1], diagonal.permute(2, 0, 1))


def test_one_matrix_is_repeated_but_blocks_of_their_own_are_not() -> None:
    shared, own = handle(orthogonal(4, 4)), handle(orthogonal(1, 4, 4))
    assert shared.rotate(normal(2, 12)).shape == (2, 12)
    for misfit in (12, 8, 2):
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            own.rotate(normal(2, misfit))
        with pytest.raises(RuntimeError, match="invalid for input of size"):
            own.rotate_rows(normal(misfit, 2))


def test_blocks_compute_in_the_banks_dtype_and_return_that_of_the_values() -> None:
    rotation = handle(orthogonal(2, 4, 4, dtype=torch.float32))
    values, dense = normal(8, 8).to(torch.bfloat16), torch.block_diag(*rotation.matrix.detach())
    for result, whole in (
        (rotation.rotate(values), values.float() @ dense),
        (rotation.unrotate(values), values.float() @ dense.T),
        (rotation.rotate_rows(values), dense.T @ values.float()),
    ):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, whole.to(torch.bfloat16))


def test_the_bank_snapshots_assigns_and_holds_blocks() -> None:
    rotation = handle(orthogonal(3, 4, 4))
    before, others = rotation.bank.snapshot(), orthogonal(3, 4, 4, seed=1)
    with rotation.bank.holding({"R1": others}):
        assert torch.equal(rotation.matrix, others)
    assert torch.equal(rotation.matrix, before["R1"])
    rotation.bank.assign({"R1": others})
    assert torch.equal(rotation.matrix, others)


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (3, 1, 4), (4, 4, 4), (12, 12)])
def test_blocks_take_no_matrix_of_another_shape(shape: tuple[int, ...]) -> None:
    rotation = handle(orthogonal(3, 4, 4))
    with pytest.raises(ValueError, match=r"^rotation R1: its shape is \(3, 4, 4\), not [^\n]+$"):
        rotation.bank.assign({"R1": torch.zeros(shape)})
    torch.testing.assert_close(rotation.matrix.detach(), orthogonal(3, 4, 4))


@pytest.mark.parametrize("kind", ["hadamard", "random", "identity"])
@pytest.mark.parametrize("order", [1, 4, 12])
def test_drawn_blocks_are_orthogonal_and_the_first_is_the_draw_of_one(kind: str, order: int) -> None:
    drawn = draw(kind, order, name="R1", seed=3, blocks=5)
    assert drawn.shape == (5, order, order)
    assert drawn.dtype == torch.float32
    assert drawn.is_contiguous()
    assert all(error.max() < 1e-6 for error in stiefel.orthogonality_error(drawn))
    assert torch.equal(drawn[0], draw(kind, order, name="R1", seed=3))
    assert torch.equal(drawn, draw(kind, order, name="R1", seed=3, blocks=5))
    if kind == "hadamard":
        signs = drawn * hadamard(order)
        torch.testing.assert_close(signs, signs[..., :1].sign().expand_as(drawn) / order**0.5)


@pytest.mark.parametrize("kind", ["hadamard", "random"])
def test_every_block_is_drawn_anew(kind: str) -> None:
    drawn = draw(kind, 12, name="R1", seed=3, blocks=6)
    assert len({block.numpy().tobytes() for block in drawn}) == 6


OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.2},
    {"lr": 0.2, "momentum": 0.5},
    {"lr": 0.2, "solver": "fixed_point"},
    {"lr": 1.5, "step_rule": "paper", "momentum": 0.5},
]


def train(parameters: list[Parameter], gradients: list[Tensor], **options: Any) -> CayleySGD:
    """Step on gradients (steps, ...) of each parameter, the last of two steps with a retraction."""
    optimizer = CayleySGD(parameters, retract_every=2, **options)
    for step in range(len(gradients[0])):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient[step].clone()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_train_bit_for_bit_like_parameters_of_their_own(options: dict[str, Any], dtype: torch.dtype) -> None:
    start = orthogonal(4, 6, 6, dtype=dtype)
    # Gradients of very different size, so that a step measured over all blocks would not be each block's own.
    gradients = (
        normal(3, 4, 6, 6, seed=1, dtype=dtype) * torch.tensor([1e-3, 1.0, 1e2, 0.0], dtype=dtype)[:, None, None]
    )
    together, alone = Parameter(start.clone()), [Parameter(block.clone()) for block in start]
    optimizers = (train([together], [gradients], **options), train(alone, list(gradients.unbind(1)), **options))
    assert torch.equal(together.detach(), torch.stack([block.detach() for block in alone]))
    assert not torch.equal(together.detach()[:3], start[:3])
    for optimizer in optimizers:
        optimizer.project()
    torch.testing.assert_close(together.detach(), torch.stack([block.detach() for block in alone]), atol=1e-6, rtol=0)
    if options.get("momentum"):
        buffers = [optimizers[1].state[block]["momentum_buffer"] for block in alone]
        assert torch.equal(optimizers[0].state[together]["momentum_buffer"], torch.stack(buffers))


@pytest.mark.parametrize("options", OPTIONS)
def test_blocks_are_stepped_in_one_batch_with_other_rotations_of_their_order(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    sizes: list[torch.Size] = []
    generator_of = stiefel.skew_generator

    def counting(rotation: Tensor, gradient: Tensor) -> Tensor:
        sizes.append(rotation.shape)
        return generator_of(rotation, gradient)

    monkeypatch.setattr(stiefel, "skew_generator", counting)
    starts = [orthogonal(*shape, seed=seed) for seed, shape in enumerate([(3, 6, 6), (6, 6), (2, 6, 6), (5, 5)])]
    gradients = [normal(3, *start.shape, seed=seed) for seed, start in enumerate(starts)]
    together = [Parameter(start.clone()) for start in starts]
    train(together, gradients, **options)
    assert sizes == [(6, 6, 6), (1, 5, 5)] * 3
    for parameter, start, gradient in zip(together, starts, gradients, strict=True):
        alone = Parameter(start.clone())
        train([alone], [gradient], **options)
        torch.testing.assert_close(parameter.detach(), alone.detach(), atol=1e-10, rtol=0)


def test_every_block_turns_by_the_learning_rate_and_stays_orthogonal() -> None:
    start = orthogonal(3, 8, 8)
    parameter = Parameter(start.clone())
    train([parameter], [normal(1, 3, 8, 8, seed=1)], lr=0.3)
    angles = stiefel.largest_rotation_angle(start, parameter.detach())
    assert angles.tolist() == pytest.approx([0.3] * 3, rel=0.01)
    assert all(error.max() < 1e-12 for error in stiefel.orthogonality_error(parameter.detach()))


def test_training_of_blocks_goes_on_after_a_reload() -> None:
    start, gradients = orthogonal(3, 6, 6, dtype=torch.float32), normal(5, 3, 6, 6, seed=1, dtype=torch.float32)
    through, halted = Parameter(start.clone()), Parameter(start.clone())
    train([through], [gradients], lr=0.1, momentum=0.5)
    file = io.BytesIO()
    torch.save(train([halted], [gradients[:3]], lr=0.1, momentum=0.5).state_dict(), file)
    file.seek(0)
    resumed = CayleySGD([halted], lr=1.0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for gradient in gradients[3:]:
        halted.grad = gradient.clone()
        resumed.step()
    assert torch.equal(halted.detach(), through.detach())


@pytest.mark.parametrize("function", [stiefel.polar_projection, stiefel.qr_retraction])
@pytest.mark.parametrize("noise", [1e-6, 0.5])
def test_blocks_are_projected_one_by_one(function: Any, noise: float) -> None:
    blocks = orthogonal(3, 6, 6)
    blocks[1] += noise * normal(6, 6, seed=1)
    projected = function(blocks)
    for whole, block in zip(projected, blocks, strict=True):
        torch.testing.assert_close(whole, function(block), atol=1e-9, rtol=0)


def test_metrics_are_those_of_the_largest_block() -> None:
    start = {"R1": orthogonal(3, 4, 4), "R2_0": orthogonal(4, 4, seed=1)}
    now = {name: matrix.clone() for name, matrix in start.items()}
    now["R1"][1] = 1.01 * orthogonal(4, 4, seed=2)
    metrics = rotation_metrics(now, start)
    block, origin = now["R1"][1].numpy(), start["R1"][1].numpy()
    dense = torch.block_diag(*now["R1"]).numpy()
    assert metrics["rotation/distance_from_init"] == pytest.approx(np.linalg.norm(block - origin) / 2)
    assert metrics["rotation/orthogonality_rrt_max"] == pytest.approx(np.abs(dense @ dense.T - np.eye(12)).max())
    assert metrics["rotation/orthogonality_rtr_max"] == pytest.approx(np.abs(dense.T @ dense - np.eye(12)).max())


@pytest.mark.parametrize("shape", [(4, 4), (1, 4, 4), (3, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_changed_bit_of_any_number_changes_the_digest(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrix = orthogonal(*shape, dtype=dtype)
    integers, width = (torch.int32, 32) if dtype == torch.float32 else (torch.int64, 64)
    digest = bit_digest(matrix)
    assert digest.shape == ()
    assert digest == bit_digest(matrix.clone())
    for place in range(matrix.numel()):
        for bit in range(width):
            other = matrix.clone()
            other.view(integers).view(-1)[place] ^= (1 << bit) if bit < width - 1 else -(1 << bit)
            assert bit_digest(other) != digest, (place, bit)
