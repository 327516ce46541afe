"""The loop begins with quantizers that fit its rotations, feeds a rank its share, and says how well it used it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin

from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.blocks import BlockSampler
from rotexp.data.options import DataConfig
from rotexp.metrics.flops import Utilization
from rotexp.optim.options import CayleySGDConfig
from rotexp.process.signals import Interrupted, StopRequest
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.trainable import train_also
from rotexp.sharding.communication import Communication
from rotexp.sharding.options import ShardingConfig
from rotexp.training.loop import Hooks, train
from rotexp.training.options import Trainable, TrainConfig
from rotexp.training.state import TrainingState

Factory = Callable[..., Any]


W4 = QuantSpec(4, symmetric=True, clip_search=True)


def measured(llama: Factory, rotated: Factory) -> tuple[Any, Config, Any, list[RotatedLinear]]:
    """Return a model measured without rotations, a run of one step, its blocks, and the linears that are quantized."""
    config = Config(
        data=DataConfig(name="text", sequence_length=8, global_batch_size=2),
        quant=QuantConfig(name="w4", weights=W4),
        rotation=RotationConfig(name="learned", init=RotationInit.random),
        optimizer=CayleySGDConfig(),
        objective=COMPONENTS["objective"]["ce"],
        train=TrainConfig(steps=1),
    )
    model = rotated(llama(), config.rotation, config.quant)
    blocks = np.random.default_rng(0).integers(0, 61, (4, 8))
    with model.mode.set(rotate=False, quantize=True), torch.no_grad():
        model.logits(torch.from_numpy(blocks))
    linears = [module for module in model.rotated_modules if isinstance(module, RotatedLinear)]
    return model, config, blocks, linears[:-1]  # the last is the head


def test_clip_ratios_searched_for_other_rotations_are_forgotten(llama: Factory, rotated: Factory) -> None:
    model, config, blocks, linears = measured(llama, rotated)
    before = [linear.weight_quantizer.clip_ratios for linear in linears]
    with model.mode.set(rotate=True, quantize=True), torch.no_grad():
        expected = [FakeQuantizer(W4).search(linear._rotated_weight()) for linear in linears]
    trained_rows(model, config, blocks)
    assert config.quant.refresh_every > 1  # so that those of the first step are still there
    for linear, old, new in zip(linears, before, expected, strict=True):
        assert torch.equal(linear.weight_quantizer.clip_ratios, new)
        assert not torch.equal(old, new)


def test_clip_ratios_that_a_checkpoint_does_not_have_are_forgotten(llama: Factory, rotated: Factory) -> None:
    """It has none if it was written right after a step that forgot them."""
    model, config, _, linears = measured(llama, rotated)
    state = TrainingState(model, config, communication=Communication())
    facts = state.facts()
    first, shape = next(iter(facts["clip_ratios"].items()))
    state.prepare_to_load(facts | {"clip_ratios": {first: shape}})
    assert [linear.weight_quantizer.clip_ratios is None for linear in linears] == [False] + [True] * (len(linears) - 1)


def simulating(sim_world: int | None, *, steps: int = 2) -> Config:
    """Return a run of a small model, all of it trained."""
    return Config(
        data=DataConfig(name="text", sequence_length=8, global_batch_size=4),
        rotation=RotationConfig(name="learned"),
        optimizer=CayleySGDConfig(),
        objective=COMPONENTS["objective"]["ce"],
        train=TrainConfig(steps=steps, params=Trainable.all),
        sharding=ShardingConfig("zero2_master", sim_world=sim_world),
    )


def trained_rows(
    model: Any, config: Config, blocks: Any, *, parts: int = 1, hooks: dict[str, Any] | None = None, **given: Any
) -> list[dict[str, float]]:
    """Train a model, each step in so many parts, and return the logged rows."""
    train_also(model, config.train.params)
    communication = Communication()
    rows: list[dict[str, float]] = []
    between: dict[str, Any] = {
        "log": lambda _step, row: rows.append(row),
        "save": lambda: None,
        "held_out_loss": lambda: 0.0,
        "stop": StopRequest(),
    }
    train(
        TrainingState(model, config, communication=communication),
        blocks,
        config,
        accelerator=Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=parts, sync_with_dataloader=False),
        ),
        communication=communication,
        teacher=None,
        hooks=Hooks(**between | (hooks or {})),
        **given,
    )
    return rows


def test_a_simulated_rank_is_fed_the_share_of_rank_0_and_counts_it(llama: Factory, rotated: Factory) -> None:
    config = simulating(2)
    blocks = np.random.default_rng(0).integers(0, 61, (9, 8))
    model, fed = rotated(llama(), config.rotation, QuantConfig()), []
    model.network.register_forward_pre_hook(lambda _network, arguments: fed.append(arguments[0].numpy()))
    rows = trained_rows(model, config, blocks)
    order = list(BlockSampler(len(blocks), global_batch_size=4, steps=2, seed=config.seed))
    np.testing.assert_array_equal(np.stack(fed), blocks[[order[:2], order[4:6]]])
    assert [row["train/tokens"] for row in rows] == [16, 32]
    assert rows[0]["throughput/tokens_per_s"] * rows[0]["time/step_s"] == pytest.approx(16)


def test_a_step_logs_the_utilization_of_its_device_where_its_peak_is_known(llama: Factory, rotated: Factory) -> None:
    config = simulating(None, steps=1)
    blocks = np.random.default_rng(0).integers(0, 61, (4, 8))
    model = rotated(llama(), config.rotation, QuantConfig())
    (row,) = trained_rows(model, config, blocks, utilization=Utilization(3_000, peak=1e6))
    assert row["throughput/mfu_pct"] == pytest.approx(100 * 3_000 * 32 / row["time/step_s"] / 1e6)
    (row,) = trained_rows(model, config, blocks, utilization=Utilization(3_000, peak=None))
    assert "throughput/mfu_pct" not in row


def test_a_step_in_parts_is_the_step_at_once(llama: Factory, rotated: Factory) -> None:
    unrotated = RotationConfig(
        "none", r1=False, r2=False, learned=False
    )  # one of a float model has only noise to follow
    whole = replace(simulating(None, steps=3), rotation=unrotated)
    blocks = np.random.default_rng(0).integers(0, 61, (12, 8))
    found: dict[int, list[dict[str, float]]] = {}
    for parts in (1, 2, 4):
        config = replace(whole, train=replace(whole.train, micro_batch_size=4 // parts))
        model = rotated(llama(), config.rotation, QuantConfig())
        found[parts] = trained_rows(model, config, blocks, parts=parts)
    assert len(found[1]) == 3
    for parts in (2, 4):
        for key in ("train/loss", "train/tokens", "grad_norm/weights"):
            assert [row[key] for row in found[parts]] == pytest.approx([row[key] for row in found[1]], rel=1e-5)


def test_a_request_to_stop_ends_training_once_its_step_is_made_logged_and_saved(
    llama: Factory, rotated: Factory
) -> None:
    config = simulating(None, steps=5)
    blocks = np.random.default_rng(0).integers(0, 61, (20, 8))
    model, stop, done = rotated(llama(), config.rotation, QuantConfig()), StopRequest(), []

    def log(step: int, _row: dict[str, float]) -> None:
        done.append(f"logged {step}")
        if step == 2:
            stop.handle(signal.SIGTERM, None)  # deferred, or it would raise here

    hooks = {"log": log, "save": lambda: done.append("saved"), "stop": stop}
    with pytest.raises(Interrupted, match=r"^interrupted by SIGTERM$"):
        trained_rows(model, config, blocks, hooks=hooks)
    assert done == ["logged 1", "logged 2", "logged 3", "saved"]
