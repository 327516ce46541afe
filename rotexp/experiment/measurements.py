"""The held-out figures of one run: every variant of its model, compared with the float model on the same windows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from rotexp.config.schema import Config
from rotexp.errors.requirements import require
from rotexp.experiment.inputs import Inputs
from rotexp.metrics.float_answers import FloatAnswers, kept_bytes, next_token_loss
from rotexp.metrics.memory import GIB
from rotexp.metrics.quality import CPU_TOKENS, Quality, Share, tokens_a_forward, windows_a_forward
from rotexp.process.host_memory import available_bytes
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationInit
from rotexp.sharding.communication import Communication
from rotexp.sharding.ema import ShardedEMA
from rotexp.sharding.guard import installed
from rotexp.sharding.local_rows import reshard
from rotexp.sharding.strategies import strategy_of
from rotexp.training.options import Trainable
from rotexp.training.teacher import LoadedTeacher, load_teacher, teacher_name


class Measurements:
    """Measures variants of one model; a variant that is known already is not measured again.

    Attributes:
        rows: the figures of each variant, and the protocol by which they were made.
        seconds: how long each variant took that was measured in this session, on this rank.
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
        self.seconds: dict[str, float] = {}
        self._float: FloatAnswers | None = None
        self._merged_is_hadamard = False
        self._share = Share(
            self._batch(),
            device,
            rank=communication.rank,
            world_size=communication.world_size,
            collect=communication.reduce_,
        )
        self._say = say
        self.teacher: LoadedTeacher | None = None

    @property
    def batch(self) -> int:
        """How many windows a forward takes."""
        return self._share.batch

    def _batch(self) -> int:
        """Return how many windows a forward takes, the same on every rank."""
        asked, windows = self._config.evaluation.micro_batch_size, self._inputs.evaluation
        if asked is not None:
            return asked
        if self._config.numerics.exact:
            return windows_a_forward(windows, tokens=CPU_TOKENS, world_size=1)
        width = self._inputs.checkpoint.config.hidden_size
        tokens = torch.tensor(tokens_a_forward(self._device, width=width), device=self._device)
        return windows_a_forward(
            windows, tokens=int(self._communication.reduce_(tokens, "min")), world_size=self._communication.world_size
        )

    def as_it_comes(self, model: RotatedModel) -> None:
        """Measure the model as its checkpoint has it, norm gains not folded: float, and quantized without rotation.

        Where these are known, the float model answers all the same if its answers are kept: later variants are compared
        to the bit as they would be otherwise.
        """
        if "quantized" in self.rows:
            if self._answers(model).wanting:
                self._answers(model).make(model)
            return
        with self._timed("float"):
            figures = {"float": self._answers(model).make(model)}
        with self._timed("quantized"):
            figures["quantized"] = figures["float"]
            if self._config.quant.enabled:
                with model.mode.set(rotate=False, quantize=True):
                    figures["quantized"] = self._compared(model)
        for row, quality in figures.items():
            self._record(row, quality)

    def take_over(self, row: str, quality: Quality) -> None:
        """Take the figures of a variant from a run that has measured the very same."""
        self._record(row, quality)

    def start(self, model: RotatedModel) -> None:
        """Measure the quantized model under the rotations that training starts from, where those are not Hadamard's."""
        rotation = self._config.rotation
        other = rotation.path or rotation.start or rotation.init is not RotationInit.hadamard
        if other and rotation.learned and self._config.train.steps and len(model.bank):
            self._measure("start", model)

    def hadamard(self, model: RotatedModel) -> None:
        """Measure the quantized model under random Hadamard rotations; say why not, if they do not exist.

        Where the merged model will be this very one, its figures are.
        """
        if missing := model.orders_without_hadamard():
            self._say(f"no random Hadamard row: order {missing[0]} has no Hadamard matrix")
        elif len(model.bank) or model.online:
            self._merged_is_hadamard = self.stays_hadamard(model)
            if not self._merged_is_hadamard:
                with model.bank.holding(self._hadamard(model)):
                    self._measure("hadamard", model)

    def stays_hadamard(self, model: RotatedModel) -> bool:
        """Return whether nothing is trained, and the rotations in use are those of the Hadamard row."""
        train = self._config.train
        trains = self._config.rotation.learned or train.params is not Trainable.rotations
        if (train.steps and trains) or model.orders_without_hadamard():
            return False
        start = self._hadamard(model)
        return all(torch.equal(matrix, start[name]) for name, matrix in model.bank.items())

    def average(self, model: RotatedModel, ema: ShardedEMA) -> None:
        """Measure the model with the averages of what was trained."""
        with ema.applied():
            self._measure("average", model, trained=True)

    def trained(self, model: RotatedModel) -> None:
        """Measure the merged model."""
        self._measure("trained", model, trained=True)
        if self._merged_is_hadamard and "hadamard" not in self.rows:
            self._record("hadamard", Quality(**self.rows["trained"]))

    def held_out_loss(self, model: RotatedModel) -> float:
        """Return the mean next-token loss, in nats, of the model in its present mode on the held-out windows.

        Clip ratios are searched for the present rotations, as for the rows; those that training goes on with, which may
        be `quant.refresh_every` - 1 steps old, are put back.
        """
        with model.fresh_quantizers(), self._reusing(model):
            loss = next_token_loss(model, self._inputs.evaluation, share=self._share)
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

    def _hadamard(self, model: RotatedModel) -> dict[str, Tensor]:
        return model.starts(RotationInit.hadamard, seed=self._config.seed)

    def _measure(self, row: str, model: RotatedModel, *, trained: bool = False) -> None:
        """Measure a variant that is not known yet, rotated and quantized.

        Args:
            trained: whether weights may have been trained, so that the float model is another one.
        """
        if row in self.rows and not trained:
            return
        with self._timed(row), model.mode.set(rotate=True, quantize=True):
            if trained and not self._answers(model).complete:
                self.load_teacher()
            quality = self._compared(model)
        self._record(row, quality)

    def _compared(self, model: RotatedModel) -> Quality:
        """Compare the model in its present mode with the float model."""
        model.refresh_quantizers()
        teacher = None if self.teacher is None else self.teacher.model
        answers = self._answers(model)
        if answers.wanting:
            answers.make(model, teacher=teacher)
        with self._reusing(model):
            return answers.compared(model, teacher=teacher)

    def _answers(self, model: RotatedModel) -> FloatAnswers:
        """Return the float model's answers, to be kept if that leaves half of the host's free memory."""
        if self._float is None:
            windows, train = self._inputs.evaluation, self._config.train
            needed, free = kept_bytes(windows, self._share, model), available_bytes()
            here = self._ranks_per_node or self._communication.world_size
            fits = torch.tensor(free is None or needed * here <= free / 2, dtype=torch.int32, device=self._device)
            kept = bool(self._communication.reduce_(fits, "min"))
            sizes = f"{needed / GIB:.1f} GiB a rank, of {(free or 0) / GIB:.1f} GiB free"
            require(
                kept or not self._config.numerics.exact,
                "numerics",
                "exact",
                f"fast where the float model's answers, which it has to keep, take {sizes}",
                "lower evaluation.max_windows, or free some",
            )
            if not kept:
                self._say(f"evaluation: the float model runs anew for every row, since its answers take {sizes}")
            head_trained = train.params is Trainable.all and train.steps > 0
            self._float = FloatAnswers(windows, self._share, expects=not head_trained, kept=kept)
        return self._float

    @contextmanager
    def _timed(self, row: str) -> Iterator[None]:
        """Keep how long the block takes, in seconds of this rank."""
        began = time.perf_counter()
        yield
        self.seconds[row] = time.perf_counter() - began

    def _reusing(self, model: RotatedModel) -> AbstractContextManager[None]:
        """Quantize each weight once for all windows, where weights are whole."""
        whole = strategy_of(self._config.sharding).keeps_weights_whole
        return model.reusing_weights() if whole else nullcontext()

    def _record(self, row: str, quality: Quality) -> None:
        """Keep a variant's figures for the summary, and log them."""
        self.rows[row] = asdict(quality)
        seconds = {f"time/eval_{row}_s": self.seconds[row]} if row in self.seconds else {}
        self._log({f"eval/{row}/{figure}": value for figure, value in asdict(quality).items()} | seconds)
