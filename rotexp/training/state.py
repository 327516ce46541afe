"""Everything that training changes, which a checkpoint therefore holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.metrics.rotations import rotation_rows
from rotexp.quant.fake import FakeQuantizer
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import SCALES, RotatedModel
from rotexp.rotation.placement import BANK
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import MASTER, ShardedEMA
from rotexp.sharding.flat import flattened, split_by_name
from rotexp.sharding.local_rows import local_rows, reshard
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.replicas import Divergence
from rotexp.sharding.split_vector import SplitVector
from rotexp.sharding.strategies import strategy_of
from rotexp.training.best import Best, Choice
from rotexp.training.optimizers import Optimizers


@dataclass
class TrainResult:
    """What training did.

    Attributes:
        losses: of all steps, in nats, those that were skipped too.
        skipped: the steps, counted from 1, that were skipped.
        best: which state did best; None before the first.
        seconds: how long the steps took.
        divergence: how far replicas were apart after the last.
        rotations: figures of every rotation after the last step, before it was projected onto its group.
    """

    losses: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    best: Choice | None = None
    seconds: float = 0.0
    divergence: Divergence = field(default_factory=Divergence)
    rotations: list[dict[str, Any]] = field(default_factory=list)


class TrainingState:
    """Rotations, weights, their optimizers, master and average, what was best of them, and the losses so far.

    Attributes:
        master: None unless the strategy splits one, and weights are trained.
        ema: None unless it is asked for.
        start: the rotations training started from.
        best: what had the smallest loss: the held-out one if `evaluation.every` asks for it, else that of a step.
        names: the trained parameters that are no rotations.
    """

    def __init__(self, model: RotatedModel, config: Config, *, communication: Communication) -> None:
        reshard(model.network)
        self.model = model
        self.result = TrainResult()
        self.start = model.bank.snapshot()
        self.names = model.trained_names if config.train.steps else []
        self.master = self._master(config, communication)
        self.rotations = {name: matrix for name, matrix in model.bank.items() if matrix.requires_grad}
        held = {name: model.network.get_parameter(name) for name in self._outside_master}
        shard = {MASTER: self.master.shard} if self.master else {}
        self.optimizers = Optimizers(self.rotations, {**shard, **held}, config)
        self.ema = self._ema(config, communication)
        self._simulated = config.sharding.sim_world is not None
        self._judged = config.evaluation.every is not None
        self.best = Best(dict(model.bank.items()), self._held())

    @property
    def step(self) -> int:
        """How many steps are done."""
        return len(self.result.losses)

    @property
    def trains(self) -> bool:
        """Whether there is anything to train."""
        return bool(self.rotations or self.names)

    @property
    def simulated(self) -> bool:
        """Whether the world is simulated, so that most weights are never stepped."""
        return self._simulated

    def weights(self) -> dict[str, Tensor | SplitVector]:
        """Return what is trained beside rotations, by name, each as this rank holds it, in its own shape."""
        inside = self.master.layout.shapes if self.master else {}
        return {name: self.model.network.get_parameter(name) for name in self.names if name not in inside}

    def _master(self, config: Config, communication: Communication) -> ZeRO2Master | None:
        names = [name for name in self.names if not name.startswith(f"{SCALES}.")]
        if not strategy_of(config.sharding).splits_master or not names:
            return None
        sharding = config.sharding
        return ZeRO2Master(
            self.model.network,
            names,
            communication=communication,
            bucket_mib=sharding.bucket_mib,
            sim_world=sharding.sim_world,
        )

    def _ema(self, config: Config, communication: Communication) -> ShardedEMA | None:
        if config.ema.decay is None:
            return None
        rotations = [f"{BANK}.{name}" for name in self.rotations]
        return ShardedEMA(
            self.model.network,
            [*rotations, *self._outside_master],
            decay=config.ema.decay,
            rotations=rotations,
            master=self.master,
            communication=communication,
        )

    @property
    def _outside_master(self) -> list[str]:
        inside = set(self.master.layout.shapes) if self.master else set()
        return [name for name in self.names if name not in inside]

    def accumulate(self) -> None:
        """Put away the gradients of a part of a step."""
        if self.master is not None:
            self.master.accumulate()

    def advance(self, loss: float) -> None:
        """Make the step whose gradients are ready and whose loss was that of the present rotations."""
        if not self._judged:
            self._offer(Choice(self.step + 1, loss, "train/loss"))
        self.optimizers.step()
        if self.master is not None:
            self.master.publish()
        if self.ema is not None:
            self.ema.update()
        self._end(loss)

    def judge(self, loss: float) -> None:
        """Take the held-out loss of what is trained as it is now, and keep that if it is the best so far."""
        if math.isfinite(loss):
            self._offer(Choice(self.step, loss, "eval/loss"))

    def conclude(self, divergence: Divergence) -> None:
        """Keep what replicas and rotations are like when training ends."""
        self.result.divergence = divergence
        rotations = self.model.bank.snapshot()
        self.result.rotations = rotation_rows(rotations, self.start, divergence=divergence.differences)

    def _offer(self, choice: Choice) -> None:
        """Keep what is trained as it is now, if it is better than what is kept."""
        best = self.result.best
        if best is None or best.by != choice.by or choice.loss < best.loss:
            self.result.best = choice
            self.best.replace(dict(self.model.bank.items()), self._held())

    def skip(self, loss: float) -> None:
        """Leave everything as it is, and count the step."""
        self.result.skipped.append(self.step + 1)
        self._end(loss)

    def _end(self, loss: float) -> None:
        self.result.losses.append(loss)
        self.optimizers.schedule()
        self.optimizers.zero_grad()
        if self.master is not None:
            self.master.discard()

    def tensors(self) -> dict[str, Tensor | SplitVector]:
        """Return what a checkpoint holds, sharing memory: rotations as they are, everything else flattened.

        Names and shapes do not depend on sharding and world.
        """
        split: dict[str, Mapping[str, Tensor | SplitVector]] = {
            "weights": self.pieces(self._held()),
            "best": self.pieces(self.best.held),
            "optimizer": self.optimizers.tensors(),
            "ema": self.ema.state() if self.ema else {},
        }
        flat = {
            f"{group}/{name}": value
            for group, tensors in split.items()
            for key, tensor in tensors.items()
            for name, value in self._flat(key, tensor).items()
        }
        whole: dict[str, dict[str, Tensor]] = {
            "rotations": dict(self.model.bank.items()),
            "start": self.start,
            "best": self.best.rotations,
            "clip_ratios": self._clip_ratios(),
        }
        return {f"{group}/{name}": matrix for group, named in whole.items() for name, matrix in named.items()} | flat

    def _held(self) -> dict[str, Tensor]:
        """Return what this rank holds of everything trained that is no rotation: rows by name, the master's shard."""
        reshard(self.model.network)  # after a forward the root's parameters are whole copies, not the shards
        rows = {name: local_rows(self.model.network.get_parameter(name)) for name in self._outside_master}
        return rows if self.master is None else {**rows, MASTER: self.master.shard.detach()}

    def pieces(self, held: Mapping[str, Tensor]) -> dict[str, SplitVector]:
        """Return what a rank holds of everything trained that is no rotation as pieces, by the parameters' names.

        Args:
            held: the rows of every parameter outside the master, and the master's shard, or copies of them.
        """
        pieces = {
            name: flattened(self.model.network.get_parameter(name), rows=held[name]) for name in self._outside_master
        }
        return pieces if self.master is None else pieces | self._cut(self.master.pieces(held[MASTER]))

    def _cut(self, pieces: SplitVector) -> dict[str, SplitVector]:
        """Return pieces of the master, or of what goes with it, by the names of its parameters."""
        assert self.master is not None
        return split_by_name(pieces, {name: shape.numel() for name, shape in self.master.layout.shapes.items()})

    def _flat(self, key: str, tensor: Tensor | SplitVector) -> dict[str, Tensor | SplitVector]:
        """Return a tensor as pieces, those of the master by the names of its parameters."""
        name, slash, part = key.partition("/")
        if name == MASTER and self.master is not None:
            if isinstance(tensor, Tensor) and tensor.ndim == 0:
                return {f"{parameter}{slash}{part}": tensor for parameter in self.master.layout.shapes}
            pieces = tensor if isinstance(tensor, SplitVector) else self.master.pieces(tensor.detach())
            return {f"{parameter}{slash}{part}": cut for parameter, cut in self._cut(pieces).items()}
        if isinstance(tensor, SplitVector) or tensor.ndim == 0:
            return {key: tensor}
        return {key: flattened(tensor)}

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint holds beside tensors, as JSON has it."""
        return {
            "losses": self.result.losses,
            "skipped": self.result.skipped,
            "best": asdict(self.result.best) if self.result.best else None,
            "seconds": self.result.seconds,
            "optimizers": self.optimizers.facts(),
            "clip_ratios": {name: list(ratios.shape) for name, ratios in self._clip_ratios().items()},
            "shapes": {name: list(self.model.network.get_parameter(name).shape) for name in self.names},
        }

    def _quantizers(self) -> dict[str, FakeQuantizer]:
        return {
            f"{name}.{own}": quantizer
            for name, module in self.model.network.named_modules()
            if isinstance(module, (RotatedLinear, RotatedExperts))
            for own, quantizer in module.weight_quantizers.items()
        }

    def _ratios_shape(self, name: str, quantizer: FakeQuantizer) -> list[int] | None:
        """Return the shape of the ratios that the quantizer of a weight searches, None if it searches none."""
        if not quantizer.spec.clip_search:
            return None
        *outputs, width = self.model.network.get_parameter(name).shape
        return [*outputs, quantizer.spec.num_groups(width)]

    def _clip_ratios(self) -> dict[str, Tensor]:
        """Return the ratios that are in use until the next search."""
        named = ((name, quantizer.clip_ratios) for name, quantizer in self._quantizers().items())
        return {name: ratios for name, ratios in named if ratios is not None}

    def prepare_to_load(self, facts: Mapping[str, Any]) -> None:
        """Make room for the tensors of a checkpoint, which are then read into those of `tensors`.

        Raises:
            ValueError: a weight has another shape there.
        """
        for name, shape in facts["shapes"].items():
            held = list(self.model.network.get_parameter(name).shape) if name in self.names else None
            if held != shape:
                raise ValueError(
                    f"{name} is {shape} there and {held} here; resume with the same model and train.params"
                )
        self.model.refresh_quantizers()  # those without ratios there search them at their next use
        quantizers = self._quantizers()
        for name, shape in facts["clip_ratios"].items():
            held = self._ratios_shape(name, quantizers[name]) if name in quantizers else None
            if shape != held:
                raise ValueError(
                    f"the clip ratios of {name} are {shape} there and {held} here; resume with the same quant"
                )
            quantizers[name].clip_ratios = torch.zeros(shape)

    def loaded(self, facts: Mapping[str, Any]) -> None:
        """Take over the rest, once the tensors are read."""
        if self.master is not None:
            self.master.publish()
        self.optimizers.load_facts(facts["optimizers"])
        self.result.losses = [float(loss) for loss in facts["losses"]]
        self.result.skipped = list(facts["skipped"])
        self.result.best = Choice(**facts["best"]) if facts["best"] else None
        self.result.seconds = facts["seconds"]
