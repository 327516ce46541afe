"""The held-out figures of one run: every variant of its model, compared with the float model on the same windows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.experiment.inputs import Inputs
from rotexp.metrics.quality import Quality, Share, evaluate, next_token_loss
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationInit
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.guard import installed
from rotexp.sharding.local_rows import reshard
from rotexp.sharding.strategies import strategy_of
from rotexp.training.objectives import Teacher
from rotexp.training.teacher import load_teacher, teacher_name


class Measurements:
    """Measures variants of one model; a variant that is known already is not measured again.

    Attributes:
        rows: the figures of each variant, and the protocol by which they were made.
        teacher: the float model, where training changes the one that there is; None until it is asked for.
    """

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        *,
        communication: Communication,
        device: torch.device,
        ranks_per_node: int | None,
        known: Mapping[str, Any],
        log: Callable[[dict[str, float]], None] = lambda _figures: None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.rows: dict[str, Any] = {"protocol": inputs.protocol, **known}
        self._config = config
        self._inputs = inputs
        self._communication = communication
        self._device = device
        self._ranks_per_node = ranks_per_node
        self._log = log
        self._share = Share(
            config.evaluation.micro_batch_size,
            device,
            rank=communication.rank,
            world_size=communication.world_size,
            collect=communication.reduce_,
        )
        self._say = say
        self.teacher: Teacher | None = None

    def as_it_comes(self, model: RotatedModel) -> None:
        """Measure the model as its checkpoint has it, norm gains not folded: float, and quantized without rotation."""
        if "quantized" in self.rows:
            return
        with model.mode.set(rotate=False, quantize=True):
            quantized, reference = self._evaluate(model)
        self._record("float", reference)
        self._record("quantized", quantized)

    def start(self, model: RotatedModel) -> None:
        """Measure the quantized model under the rotations that training starts from, where those are not Hadamard's."""
        rotation = self._config.rotation
        other = rotation.path or rotation.start or rotation.init is not RotationInit.hadamard
        if other and rotation.learned and self._config.train.steps and len(model.bank) and "start" not in self.rows:
            with model.mode.set(rotate=True, quantize=True):
                self._record("start", self._evaluate(model)[0])

    def hadamard(self, model: RotatedModel) -> None:
        """Measure the quantized model under random Hadamard rotations; say why not, if they do not exist."""
        if "hadamard" in self.rows:
            return
        if missing := model.orders_without_hadamard():
            self._say(f"no random Hadamard row: order {missing[0]} has no Hadamard matrix")
        elif len(model.bank) or model.online:
            start = model.starts(RotationInit.hadamard, seed=self._config.seed)
            with model.bank.holding(start), model.mode.set(rotate=True, quantize=True):
                self._record("hadamard", self._evaluate(model)[0])

    def average(self, model: RotatedModel, ema: ShardedEMA) -> None:
        """Measure the model with the averages of what was trained."""
        self.load_teacher()
        with ema.applied(), model.mode.set(rotate=True, quantize=True):
            self._record("average", self._evaluate(model)[0])

    def trained(self, model: RotatedModel) -> None:
        """Measure the merged model."""
        self.load_teacher()
        with model.mode.set(rotate=True, quantize=True):
            self._record("trained", self._evaluate(model)[0])

    def held_out_loss(self, model: RotatedModel) -> float:
        """Return the mean next-token loss, in nats, of the model in its present mode on the held-out windows.

        Clip ratios are searched for the present rotations, as for the rows; those that training goes on with, which may
        be `quant.refresh_every` - 1 steps old, are put back.
        """
        with model.fresh_quantizers(), self._reusing(model):
            loss = next_token_loss(model.logits, self._inputs.evaluation, share=self._share)
        reshard(model.network)  # a forward without backward leaves the root gathered
        return loss

    def load_teacher(self) -> None:
        """Read the float model once more, if training changes the one that there is, and say what of it is guarded."""
        train = self._config.train
        if self.teacher is None and train.params.weights and train.steps:
            self.teacher = load_teacher(
                self._inputs.checkpoint,
                self._config,
                device=self._device,
                communication=self._communication,
                ranks_per_node=self._ranks_per_node,
            )
            guard = installed()
            if guard is not None:
                self._say(guard.line(teacher_name(self._inputs.checkpoint), self._config.sync_mode))

    def _evaluate(self, model: RotatedModel) -> tuple[Quality, Quality]:
        """Measure the model in its present mode, and the float model, on the held-out windows."""
        model.refresh_quantizers()

        def reference(token_ids: Tensor) -> Tensor:
            if self.teacher is not None:
                return self.teacher(token_ids)
            with model.mode.set(rotate=False, quantize=False):
                return model.logits(token_ids)

        with self._reusing(model):
            return evaluate(model.logits, reference, self._inputs.evaluation, share=self._share)

    def _reusing(self, model: RotatedModel) -> AbstractContextManager[None]:
        """Quantize each weight once for all windows, where weights are whole."""
        whole = strategy_of(self._config.sharding).keeps_weights_whole
        return model.reusing_weights() if whole else nullcontext()

    def _record(self, row: str, quality: Quality) -> None:
        """Keep a variant's figures for the summary, and log them."""
        self.rows[row] = asdict(quality)
        self._log({f"eval/{row}/{figure}": value for figure, value in asdict(quality).items()})
