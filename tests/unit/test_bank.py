"""The bank owns every rotation once, keeps its precision, and its handles follow it through moves, copies and loads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.orthogonal.hadamard import random_orthogonal
from rotexp.rotation.bank import Rotation, RotationBank, draw
from rotexp.rotation.options import RotationConfig

NAMES = ["R1", "R2_0", "R2_1"]


def orthogonal(order: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_orthogonal(order, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def block_diagonal(matrix: Tensor, *, width: int) -> Tensor:
    return torch.block_diag(*[matrix] * (width // len(matrix)))


@pytest.fixture
def model(llama: Callable[..., Any], rotated: Callable[..., Any]) -> Any:
    return rotated(llama(attention_bias=True))


@pytest.fixture
def bank() -> RotationBank:
    bank = RotationBank()
    bank.add("R1", orthogonal(8))
    bank.add("R2_0", orthogonal(4, dtype=torch.float64))
    return bank


def test_a_model_registers_every_rotation_once_in_stable_order(model: Any) -> None:
    expected = [f"rotation_bank.{name}" for name in NAMES]
    everything = dict(model.network.named_parameters(remove_duplicate=False))
    matrices = {id(matrix) for matrix in model.bank.parameters()}
    assert [name for name, parameter in everything.items() if id(parameter) in matrices] == expected
    assert [name for name in model.network.state_dict() if "R" in name] == expected
    assert [name for name, _ in model.bank.items()] == NAMES
    assert len(model.bank) == 3
    assert "R1" in model.bank
    assert "R3" not in model.bank


def test_optimizers_see_each_rotation_once(model: Any) -> None:
    trainable = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    optimizer = CayleySGD(trainable, lr=0.1)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert [id(parameter) for parameter in held] == [id(matrix) for _, matrix in model.bank.items()]


def test_rotations_that_are_not_learned_are_frozen(llama: Callable[..., Any], rotated: Callable[..., Any]) -> None:
    model = rotated(llama(), RotationConfig(learned=False))
    assert len(model.bank) == 3
    assert not any(parameter.requires_grad for parameter in model.network.parameters())


@pytest.mark.parametrize(
    ("convert", "dtype"),
    [
        (lambda network: network.to(torch.bfloat16), torch.bfloat16),
        (lambda network: network.half(), torch.float16),
        (lambda network: network.bfloat16(), torch.bfloat16),
        (lambda network: network.double(), torch.float64),
    ],
)
def test_rotations_keep_their_dtype_and_bits_when_the_model_changes_its_own(
    model: Any, convert: Callable[[nn.Module], nn.Module], dtype: torch.dtype
) -> None:
    before = model.bank.snapshot()
    convert(model.network)
    assert model.network.lm_head.weight.dtype == dtype
    for name, matrix in model.bank.items():
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, before[name])
        assert matrix.requires_grad


def test_float64_rotations_and_their_gradients_keep_their_dtype(bank: RotationBank) -> None:
    bank["R2_0"].sum().backward()
    bank.to(torch.bfloat16)
    assert bank["R2_0"].dtype == bank["R2_0"].grad.dtype == torch.float64
    assert bank["R1"].dtype == torch.float32


def test_the_bank_follows_the_model_to_a_device(model: Any) -> None:
    model.network.to("meta")
    assert {matrix.device.type for matrix in model.bank.parameters()} == {"meta"}


def test_handles_of_a_copy_point_to_the_copied_bank(model: Any, token_ids: Tensor) -> None:
    network = copy.deepcopy(model.network)
    handles = [module.input_rotation for module in network.modules() if getattr(module, "input_rotation", None)]
    assert handles
    assert all(handle.bank is network.rotation_bank for handle in handles)
    assert network.rotation_bank is not model.bank
    with model.mode.set(rotate=True, quantize=False):
        before = model.logits(token_ids)
        network.rotation_bank.assign({"R1": 2 * network.rotation_bank["R1"]})
        assert torch.equal(model.logits(token_ids), before)
    network.lm_head.mode.rotate = True
    hidden = normal(1, 48, dtype=torch.float32)
    doubled = nn.functional.linear(hidden @ (2 * model.bank["R1"]).mT, network.lm_head.weight)
    torch.testing.assert_close(network.lm_head(hidden), doubled)


def test_a_copied_dataclass_is_wholly_its_own(model: Any, token_ids: Tensor) -> None:
    twin = copy.deepcopy(model)
    twin.bank.assign({"R1": torch.zeros(48, 48)})
    with twin.mode.set(rotate=True, quantize=False):
        assert not model.mode.rotate
        assert torch.equal(twin.logits(token_ids), torch.zeros(3, 10, 61))


@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_state_dict_is_seen_by_the_handles(
    llama: Callable[..., Any], rotated: Callable[..., Any], token_ids: Tensor, assign: bool
) -> None:
    first, second = rotated(llama(seed=1), seed=1), rotated(llama(seed=2), seed=2)
    second.network.load_state_dict(copy.deepcopy(first.network.state_dict()), assign=assign)
    for name, matrix in second.bank.items():
        assert matrix.dtype == torch.float32
        assert torch.equal(matrix, first.bank[name])
    for model in (first, second):
        model.mode.rotate = True
    assert torch.equal(first.logits(token_ids), second.logits(token_ids))
    second.bank.assign({"R2_0": 2 * second.bank["R2_0"]})
    assert not torch.equal(first.logits(token_ids), second.logits(token_ids))


def test_a_parameter_belongs_to_one_rotation(bank: RotationBank) -> None:
    with pytest.raises(ValueError, match=r"rotation R9: its parameter is already R1"):
        bank.add("R9", bank["R1"])
    assert "R9" not in bank


def test_a_tensor_is_copied_so_that_rotations_never_share_memory(bank: RotationBank) -> None:
    matrix = orthogonal(4).mT
    bank.add("R3", matrix)
    bank.add("R4", matrix)
    bank.assign({"R3": torch.zeros(4, 4)})
    assert torch.equal(bank["R4"], matrix)
    assert bank["R4"].is_contiguous()


def test_a_parameter_is_taken_as_it_is(bank: RotationBank) -> None:
    matrix = nn.Parameter(orthogonal(4), requires_grad=False)
    handle = bank.add("R3", matrix)
    assert bank["R3"] is handle.matrix is matrix


@pytest.mark.parametrize(
    "matrix",
    [
        torch.eye(4, dtype=torch.bfloat16),
        torch.eye(4, dtype=torch.float16),
        torch.ones(3, 4),
        torch.ones(4),
        torch.ones(2, 4, 3),
        torch.ones(1, 2, 4, 4),
        torch.ones(2, 4, 4, dtype=torch.bfloat16),
    ],
)
def test_what_is_no_stack_of_square_matrices_of_full_precision_is_refused(bank: RotationBank, matrix: Tensor) -> None:
    with pytest.raises(ValueError, match=r"rotation R3: must be \(n, n\) or \(blocks, n, n\), .* not torch\."):
        bank.add("R3", matrix)
    assert "R3" not in bank


@pytest.mark.parametrize("name", ["R1", "", "2R", "R.2", "R 2", "items", "training", "forward"])
def test_taken_and_unusable_names_are_refused(bank: RotationBank, name: str) -> None:
    with pytest.raises(ValueError, match=f"rotation '{name}': the name is taken or no identifier"):
        bank.add(name, orthogonal(4))
    assert len(bank) == 2


def test_pruned_rotations_are_gone_and_their_names_free(bank: RotationBank) -> None:
    bank.prune(["R1"])
    assert [name for name, _ in bank.items()] == ["R2_0"]
    assert list(bank.state_dict()) == ["R2_0"]
    bank.add("R1", orthogonal(4))
    bank.prune(name for name, _ in bank.items())
    assert len(bank) == 0


def test_a_snapshot_does_not_follow_the_bank(bank: RotationBank) -> None:
    snapshot = bank.snapshot()
    assert not snapshot["R1"].requires_grad
    bank.assign({"R1": torch.zeros(8, 8)})
    assert torch.equal(snapshot["R1"], orthogonal(8))


def bits(bank: RotationBank) -> dict[str, bytes]:
    return {name: matrix.detach().numpy().tobytes() for name, matrix in bank.items()}


def test_held_values_are_seen_inside_and_the_former_bits_after(bank: RotationBank) -> None:
    bank.assign({"R1": torch.full((8, 8), float("nan")), "R2_0": torch.full((4, 4), -0.0)})
    before, parameter = bits(bank), bank["R1"]
    with bank.holding({"R1": orthogonal(8, seed=1)}):
        assert torch.equal(bank["R1"], orthogonal(8, seed=1))
        assert bits(bank)["R2_0"] == before["R2_0"]
        bank.assign({"R2_0": torch.ones(4, 4)})
    assert bits(bank) == before
    assert bank["R1"] is parameter


def test_held_values_are_given_up_after_an_exception(bank: RotationBank) -> None:
    before = bits(bank)
    with pytest.raises(ArithmeticError), bank.holding({"R1": torch.zeros(8, 8)}):
        raise ArithmeticError
    assert bits(bank) == before


def test_values_that_cannot_be_held_change_nothing(bank: RotationBank) -> None:
    before = bits(bank)
    with pytest.raises(KeyError), bank.holding({"R1": torch.zeros(8, 8), "R9": torch.zeros(4, 4)}):
        pass
    assert bits(bank) == before


@pytest.mark.parametrize("shape", [(), (4,), (1, 4), (4, 1), (1, 4, 4), (8, 8)])
def test_values_of_another_shape_are_refused_before_any_is_taken(bank: RotationBank, shape: tuple[int, ...]) -> None:
    before = bits(bank)
    with pytest.raises(ValueError, match=r"^rotation R2_0: its shape is \(4, 4\), not [^\n]+$") as refusal:
        bank.assign({"R1": torch.zeros(8, 8), "R2_0": torch.zeros(shape)})
    assert str(shape) in str(refusal.value)
    assert bits(bank) == before


@pytest.mark.parametrize("width", [4, 12])
def test_handles_rotate_block_by_block(width: int) -> None:
    matrix = orthogonal(4, dtype=torch.float64)
    handle = RotationBank().add("R2_0", matrix)
    dense = block_diagonal(matrix, width=width)
    tokens, weight, bias = normal(2, 3, width), normal(width, 5, seed=1), normal(width, seed=2)
    torch.testing.assert_close(handle.rotate(tokens), tokens @ dense)
    torch.testing.assert_close(handle.unrotate(tokens), tokens @ dense.T)
    torch.testing.assert_close(handle.unrotate(handle.rotate(tokens)), tokens)
    torch.testing.assert_close(handle.rotate_rows(weight), dense.T @ weight)
    torch.testing.assert_close(handle.rotate_rows(bias), dense.T @ bias)


def test_handles_compute_in_the_banks_dtype_and_return_that_of_the_values() -> None:
    handle = RotationBank().add("R1", orthogonal(8))
    values = normal(8, 8).to(torch.bfloat16)
    for result, whole in (
        (handle.rotate(values), values.float() @ handle.matrix),
        (handle.unrotate(values), values.float() @ handle.matrix.T),
        (handle.rotate_rows(values), handle.matrix.T @ values.float()),
    ):
        assert torch.equal(result, whole.to(torch.bfloat16))


def test_a_handle_is_no_module_and_no_parameter(bank: RotationBank) -> None:
    consumer = nn.Module()
    consumer.handle = Rotation(bank, "R1")
    assert not list(consumer.parameters())
    assert not list(consumer.children())


@pytest.mark.parametrize("kind", ["hadamard", "random", "identity"])
def test_draws_are_orthogonal_float32(kind: str) -> None:
    matrix = draw(kind, 12, name="R1", seed=3)
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix.double() @ matrix.double().T, torch.eye(12).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["hadamard", "random"])
def test_a_draw_depends_on_its_seed_and_name_and_nothing_else(kind: str) -> None:
    alone = draw(kind, 12, name="R2_1", seed=3)
    torch.manual_seed(99)
    others = [draw(kind, 12, name=name, seed=seed) for name, seed in (("R1", 3), ("R2_0", 3), ("R2_1", 4))]
    state = torch.get_rng_state()
    assert torch.equal(draw(kind, 12, name="R2_1", seed=3), alone)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(torch.equal(other, alone) for other in others)


def test_starts_are_those_of_a_model_placed_with_that_seed(
    llama: Callable[..., Any], rotated: Callable[..., Any]
) -> None:
    first, second = rotated(llama(), seed=1), rotated(llama(), seed=2)
    starts = first.starts(RotationConfig().init, seed=2)
    assert list(starts) == NAMES
    assert all(torch.equal(start, second.bank[name]) for name, start in starts.items())
