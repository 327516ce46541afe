"""What must hold on an accelerator as it does on a CPU."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_sections import closed_form, peak_of_step
from benchmarks.ranks import RankRequest, run_world
from benchmarks.variants import LIMIT, QUANTIZERS, Workload, load_network, rotated_model
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.orthogonal.hadamard import HadamardTransform, random_orthogonal
from rotexp.orthogonal.stiefel import orthogonality_error
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.training.objectives import CrossEntropy

MODES = ("off", "selective", "universal", "event")


@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(4, symmetric=False), QuantSpec(4, clip_search=True)], ids=str)
def test_quantizers_give_the_values_of_the_cpu(spec: QuantSpec) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(FakeQuantizer(spec)(x.cuda()).cpu(), FakeQuantizer(spec)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [64, 576, 1536, 8192])
def test_the_hadamard_transform_gives_the_values_of_the_cpu(order: int) -> None:
    transform = HadamardTransform(order)
    x = torch.randn(4, order, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transform(x.cuda()).cpu(), transform(x), rtol=1e-4, atol=1e-4)


def test_optimizer_steps_keep_rotations_orthogonal() -> None:
    generator = torch.Generator().manual_seed(0)
    rotation = torch.nn.Parameter(random_orthogonal(576, generator=generator).cuda())
    optimizer = CayleySGD([rotation], lr=0.1)
    for _ in range(20):
        rotation.grad = torch.randn(576, 576, generator=generator).cuda()
        optimizer.step()
    assert max(float(error.max()) for error in orthogonality_error(rotation.detach())) < 2e-5


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_gradients_of_rotations_are_those_of_the_cpu(quantizer: str) -> None:
    gradients = []
    for device in ("cpu", "cuda"):
        workload = Workload("nano", 1, 32, device=torch.device(device))
        network = load_network(Workload("nano", 1, 32)).to(device)
        model = rotated_model(network, quantizer)
        CrossEntropy()(model, workload.token_ids(2048)).backward()
        gradient = model.bank["R1"].grad
        assert gradient is not None
        gradients.append(gradient.cpu())
    # A last-bit difference can flip a 4-bit rounding, so directions are compared and not bits.
    assert torch.nn.functional.cosine_similarity(*(gradient.flatten() for gradient in gradients), dim=0) > 0.95


def test_the_guards_modes_run_on_one_device(tmp_path: Path) -> None:
    request = RankRequest("w4a4", "nano", tokens=32, modes=MODES, device="cuda", dtype="bfloat16")
    found = run_world(request, tmp_path / "found.json", world_size=1, timeout=120)
    assert found["modes"]["universal"]["barriers"] > 0
    assert found["modes"]["event"]["barriers"] == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA accelerators")
def test_the_guards_modes_run_on_two_devices(tmp_path: Path) -> None:
    request = RankRequest("w4a4", "nano", tokens=32, modes=MODES, device="cuda", dtype="bfloat16")
    found = run_world(request, tmp_path / "found.json", world_size=2, timeout=120)
    assert found["collectives"]["allreduce_"] == 1


def test_the_limits_peak_is_what_the_closed_form_says() -> None:
    workload = Workload("135m", 1, 1024, torch.bfloat16, torch.device("cuda"))
    network = load_network(workload)
    peak = peak_of_step(LIMIT, network, workload)["peak_allocated_gib"] * 2**30
    assert peak == pytest.approx(closed_form(LIMIT, network, workload), rel=0.25)
