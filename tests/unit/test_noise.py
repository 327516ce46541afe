"""Rounding noise moves every weight of the embedding to the next number, alike for any sharding, and parts runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from nano_run import NANO
from safetensors.torch import load_file
from torch import Tensor, nn

from rotexp.config.schema import Config
from rotexp.config.validation import validate
from rotexp.experiment.beginning import find_beginning
from rotexp.experiment.context import Context, open_context
from rotexp.experiment.experiment import run_experiment
from rotexp.experiment.inputs import open_inputs
from rotexp.experiment.loading import load_model, shard_model
from rotexp.models import rounding_noise
from rotexp.models.rounding_noise import perturb_embedding
from rotexp.runfolder.records import read_summary
from rotexp.tracking.phases import PhaseError
from rotexp.training.options import NumericsConfig, TrainConfig
from rotexp.training.teacher import load_teacher

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def own_accelerator() -> Any:
    """Let torch be as deterministic as it was before."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


class Embedded(nn.Module):
    """A model of an embedding alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.tokens = nn.Embedding(*weight.shape, _weight=weight)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, as Hugging Face's models do."""
        return self.tokens


def perturbed(weight: Tensor, *, seed: int = 0) -> Tensor:
    model = Embedded(weight.clone())
    perturb_embedding(model, seed=seed)
    return model.tokens.weight.detach()


def neighbors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next numbers above and below, by another way: of all numbers of 16 bits, or by torch's own."""
    if weight.dtype is torch.float32:
        return tuple(torch.nextafter(weight, torch.full_like(weight, end)) for end in (torch.inf, -torch.inf))
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(weight.dtype).double()
    numbers = every[every.isfinite()].unique()
    places = torch.searchsorted(numbers, weight.double())
    return numbers[places + 1].to(weight.dtype), numbers[places - 1].to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_becomes_the_next_number_up_or_down(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(301, 48).to(dtype)
    found, (above, below) = perturbed(weight), neighbors(weight)
    risen = found == above
    assert bool((risen | (found == below)).all())
    for share in (risen.double().mean(), risen.double().mean(0).min(), risen.double().mean(1).min()):
        assert 0.2 < share < 0.8
    assert not torch.equal(risen, perturbed(weight, seed=1) == above)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_has_no_next_number_stays(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    weight = torch.tensor([[0.0, -0.0, largest, -largest]] * 64, dtype=dtype)
    found = perturbed(weight)
    assert bool(found.isfinite().all())
    assert torch.equal(found[:, :2], weight[:, :2])
    smaller = neighbors(weight[:, 2:] / 2)[0].abs().max()  # some number that is no end of its dtype
    assert bool((found[:, 2:].abs() > smaller).all())
    assert bool((found[:, 2:] == weight[:, 2:]).any())
    assert bool((found[:, 2:] != weight[:, 2:]).any())


def test_the_numbers_do_not_depend_on_how_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 48)
    whole = perturbed(weight)
    monkeypatch.setattr(rounding_noise, "CHUNK_ELEMENTS", 5 * 48)
    assert torch.equal(perturbed(weight), whole)
    monkeypatch.setattr(rounding_noise, "row_slice", lambda _weight: slice(11, 20))
    assert torch.equal(perturbed(weight[11:20]), whole[11:20])


@pytest.mark.parametrize(("seed", "shown"), [(-1, "-1"), (2**32, "4294967296")])
def test_a_seed_that_cannot_be_is_refused(seed: int, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"^numerics\.noise_seed={shown}: must be 0 or more, below 2\*\*32, or null;"):
        validate(replace(NANO, numerics=NumericsConfig(noise_seed=seed)))
    validate(replace(NANO, numerics=NumericsConfig(noise_seed=2**32 - 1)))


Open = Callable[..., Context]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """Opens a run of `NANO` with noise of a seed and other changes."""

    def open_noisy(seed: int | None, folder: str = "run", **changes: Any) -> Context:
        config: Config = replace(NANO, numerics=NumericsConfig(noise_seed=seed), **changes)
        (tmp_path / folder).mkdir(exist_ok=True)
        inputs = replace(open_inputs(config), beginning=find_beginning(config, tmp_path / folder))
        return open_context(config, inputs, tmp_path / folder, accelerator=Accelerator(cpu=True))

    return open_noisy


def loaded(context: Context) -> tuple[dict[str, Tensor], str]:
    """Return a run's weights as it reads them, and their digest."""
    with ExitStack() as at_end:
        model = load_model(context)
        digest = shard_model(context, model, at_end).weights
        weights = {name: parameter.detach().clone() for name, parameter in model.network.named_parameters()}
    context.record.finish({})
    return weights, digest


def test_noise_is_in_the_embedding_alone_and_in_the_digest(opened: Open) -> None:
    (plain, first), (noisy, second), (again, third), (_, other) = (loaded(opened(seed)) for seed in (None, 0, 0, 1))
    name = "model.embed_tokens.weight"
    assert [key for key in plain if not torch.equal(plain[key], noisy[key])] == [name]
    assert torch.equal(noisy[name], perturbed(plain[name]))
    assert torch.equal(noisy[name], again[name])
    assert second == third
    assert len({first, second, other}) == 3


def test_a_teacher_has_the_noise_of_its_student(opened: Open) -> None:
    context = opened(3)
    teacher = load_teacher(
        context.inputs.checkpoint,
        context.config,
        device=torch.device("cpu"),
        communication=context.communication,
        ranks_per_node=None,
    )
    weights, _ = loaded(context)
    for name, parameter in teacher.model.network.named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_runs_of_two_seeds_differ_by_rounding(opened: Open, tmp_path: Path) -> None:
    for name, seed in (("plain", None), ("noisy", 0), ("again", 0)):
        run_experiment(opened(seed, name))
    plain, noisy, again = (load_file(tmp_path / name / "rotations.safetensors") for name in ("plain", "noisy", "again"))
    for name, matrix in plain.items():
        assert torch.equal(noisy[name], again[name])
        assert not torch.equal(noisy[name], matrix)
        assert (noisy[name] - matrix).abs().max() < 1e-3
    rows = [read_summary(tmp_path / name)["evaluation"]["float"]["perplexity"] for name in ("plain", "noisy")]
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)


def test_a_checkpoint_of_another_seed_is_not_resumed_from(opened: Open) -> None:
    first = opened(0, train=TrainConfig(steps=1))
    run_experiment(first)
    more = {"resume": str(first.folder), "train": TrainConfig(steps=2)}
    for seed in (None, 1):
        with pytest.raises(PhaseError, match=r"was trained on other weights .* name a checkpoint of this model"):
            run_experiment(opened(seed, f"with-{seed}", **more))
    same = opened(0, "same", **more)
    run_experiment(same)
    assert read_summary(same.folder)["train"]["steps"] == 2
