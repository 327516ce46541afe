"""What the ranks of the divided weights' tests do: train small models, the work on weights divided or not."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "plugins" / "formats"))

import torch
import torch.distributed as dist
from families import FAMILIES, VOCABULARY, from_config
from torch import Tensor

from benchmarks.collectives import CollectiveCounter
from benchmarks.flops import count_flops
from rotexp.models.arch import find_spec
from rotexp.models.load import checkpoint_layers
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.optim.options import CayleySGDOptions
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import draw
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.own_rows import division
from rotexp.rotation.placement import place
from rotexp.sharding.applying import shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import strategy_of
from rotexp.training.coordinator import Coordinator
from rotexp.training.objectives import CrossEntropy, KLDivergence

STEPS, BLOCKS, TOKENS = 3, 8, 12
SEARCHED = QuantSpec(4, clip_search=True)
ROTATION = RotationConfig(r1=True, r2=True, r3=None, r4=False, init=RotationInit.random)


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        name, options: a family, and what is special in its config.
        accumulated: parts in which a rank takes its blocks.
        distilled: whether a teacher's forward, neither rotated nor quantized, comes before each of the model's own.
        refreshed: whether clip ratios are searched anew after each step.
        divided: whether the work may be divided.
        wire: what a byte counts, in multiply-adds, when it is decided what is divided; 0 divides whatever can be.
    """

    name: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    strategy: str = "full"
    sharding: dict[str, Any] = field(default_factory=dict)
    weights: QuantSpec = SEARCHED
    activations: QuantSpec = field(default_factory=QuantSpec)
    rotation: RotationConfig = ROTATION
    accumulated: int = 1
    checkpointed: bool = False
    distilled: bool = False
    refreshed: bool = False
    divided: bool = True
    wire: int = 0


def train_all(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Train every case, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {name: _Training(case).run() for name, case in cases.items()}


class _Training:
    """A model, placed, sharded and prepared as a run does it, and what trains it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sharding = ShardingConfig(case.strategy, **case.sharding)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self.communication = Communication(rank=rank, world_size=world_size)
        self.model = self._model()
        self.coordinator = Coordinator(self.model.network, self.communication)
        self.optimizer = CayleySGD([matrix for _, matrix in self.model.bank.items()], lr=CayleySGDOptions.lr)
        self.token_ids = torch.randint(VOCABULARY, (BLOCKS, TOKENS), generator=torch.Generator().manual_seed(1))
        self.parts = self.token_ids.chunk(world_size)[rank].chunk(case.accumulated)
        self.objective = KLDivergence() if case.distilled else CrossEntropy()

    def _model(self) -> RotatedModel:
        case = self.case
        network = from_config(FAMILIES[case.name].config(**{"tie_word_embeddings": False, **case.options}))
        if case.checkpointed:
            checkpoint_layers(network, find_spec(network))
        quant = QuantConfig(weights=case.weights, activations=case.activations)
        model = place(network, find_spec(network), case.rotation, quant, seed=0)
        shard(
            network,
            self.sharding,
            units=model.units,
            ignored=model.unsharded,
            device_type="cpu",
            world_size=self.communication.world_size,
        )
        model.keep_codes(not strategy_of(self.sharding).reshards_after_forward)
        prepare(model)
        return model

    def run(self) -> dict[str, Any]:
        """Take a few steps; return losses, gradients, rotations and what the last step moved and computed."""
        found: dict[str, Any] = {"losses": [], "gradients": [], "stepped": []}
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(division, "multiply_adds_per_byte", return_value=self.case.wire))
            stack.enter_context(self.model.mode.set(rotate=True, quantize=True))
            self.division = stack.enter_context(self._dividing())
            for step in range(STEPS):
                self._prescribe(step)
                found["losses"].append(self._step(found["gradients"]))
                found["stepped"].append(self._rotations())
            with CollectiveCounter() as counter:
                self._forward_backward()
            self._touch_rotations()
            found["flops"] = count_flops(self._forward_backward)
            found["ratios"] = self._clip_ratios()
            found["weights"] = len(self.division.weights)
            found["next"] = self._forward_backward().item()
        found["resumed"], found["searched anew"] = self._again(refreshed=False), self._again(refreshed=True)
        bank = set(self.model.bank.parameters())
        others = [parameter for parameter in self.model.network.parameters() if parameter not in bank]
        trained = {"rotations": self._rotations(), "divergence": self.coordinator.divergence().max_abs_diff}
        with torch.no_grad():
            self._prescribe(STEPS)
        return found | {
            **trained,
            "collectives": dict(counter.seen.counts),
            "bytes": dict(counter.seen.num_bytes),
            "frozen": all(parameter.grad is None and not parameter.requires_grad for parameter in others),
            "float": self._logits(quantize=False),
            "quantized": self._logits(quantize=True),
        }

    def _dividing(self) -> AbstractContextManager[division.Division]:
        communication, frozen = self.communication, self.case.divided
        return division.dividing(self.model, self.sharding, communication=communication, frozen=frozen)

    @torch.no_grad()
    def _prescribe(self, step: int) -> None:
        """Begin a step with rotations of its own: those that steps leave part by rounding, which training amplifies."""
        for name, matrix in self.model.bank.items():
            blocks = len(matrix) if matrix.ndim == 3 else None
            matrix.copy_(draw("random", matrix.shape[-1], name=name, seed=step, blocks=blocks))

    def _rotations(self) -> dict[str, Any]:
        return {name: matrix.detach().numpy().copy() for name, matrix in self.model.bank.items()}

    def _again(self, *, refreshed: bool) -> float:
        """Return the next step's loss of a training that begins here, with the clip ratios that quantizers hold."""
        if refreshed:
            self.model.refresh_quantizers()
        with self.model.mode.set(rotate=True, quantize=True), self._dividing():
            loss = self._forward_backward().item()
        self.optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def _touch_rotations(self) -> None:
        """Let rotations be others than those that weights were quantized with."""
        for _, matrix in self.model.bank.items():
            matrix.mul_(1.0)

    def _step(self, gradients: list[dict[str, Any]]) -> float:
        loss = self._forward_backward()
        self.division.collect()
        mean: float = self.coordinator.consolidate(loss.reshape(1)).item()
        gradients.append({name: matrix.grad.numpy().copy() for name, matrix in self.model.bank.items()})
        with self.communication.equal_threads():
            self.optimizer.step()
        self.optimizer.zero_grad()
        if self.case.refreshed:
            self.model.refresh_quantizers()
        return mean

    def _forward_backward(self) -> Tensor:
        loss = torch.zeros(())
        for part in self.parts:
            share = self.objective(self.model, part, teacher=self._teacher) / len(self.parts)
            share.backward()
            loss += share.detach()
        return loss

    @torch.no_grad()
    def _teacher(self, token_ids: Tensor) -> Tensor:
        with self.model.mode.set(rotate=False, quantize=False):
            return self.model.logits(token_ids)

    def _clip_ratios(self) -> dict[str, Any]:
        """Return the ratios that a checkpoint would hold."""
        self.division.publish_clip_ratios()
        quantizers = {name: getattr(m, "weight_quantizer", None) for name, m in self.model.network.named_modules()}
        held = {name: quantizer.clip_ratios for name, quantizer in quantizers.items() if quantizer is not None}
        return {name: ratios.numpy() for name, ratios in held.items() if ratios is not None}

    @torch.no_grad()
    def _logits(self, *, quantize: bool) -> Any:
        """Compute after training, when weights have to be themselves again."""
        self.model.refresh_quantizers()
        with self.model.mode.set(rotate=quantize, quantize=quantize):
            return self.model.logits(self.token_ids).float().numpy()
