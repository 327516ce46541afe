"""The options of training: what is trained, on which objective, for how long, and how the rest is optimized."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rotexp.errors.requirements import require


class LrSchedule(Enum):
    """How the learning rate goes from its peak over the steps (the names of `transformers.get_scheduler`)."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Trainable(Enum):
    """What is trained: rotations, and what stands around them."""

    rotations = "rotations"
    rotations_and_norms = "rotations_and_norms"
    rotations_and_scales = "rotations_and_scales"
    all = "all"

    @property
    def weights(self) -> bool:
        """Whether parameters of the float model itself are trained."""
        return self in (Trainable.rotations_and_norms, Trainable.all)

    @property
    def rate(self) -> str:
        """The name in `AdamWConfig` of the learning rate of what is trained beside rotations."""
        return "scales_lr" if self is Trainable.rotations_and_scales else "lr"


class OnNonfinite(Enum):
    """What to do when a loss or a gradient is not finite."""

    stop = "stop"
    skip = "skip"


@dataclass(frozen=True)
class TopKObjectiveConfig:
    """`objective=kl_topk`: over the float model's `k` most likely tokens."""

    name: str = "kl_topk"
    _target_: str = "rotexp.training.objectives.TopKKLDivergence"
    k: int = 64

    def validate(self, key: str) -> None:
        """Raise ValueError when an option cannot be used."""
        require(self.k >= 1, f"{key}.k", self.k, "at least 1", "name how many tokens of the float model to compare")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop.

    Attributes:
        steps: optimizer steps.
        params: what is trained.
        micro_batch_size: in blocks a rank (None: all of its share of the global batch, or under `numerics=exact` one).
        lr_schedule: how the learning rate falls from its peak.
        warmup_steps: over which it rises to that peak.
        log_every: steps between two rows of `metrics.jsonl`.
        gradient_checkpointing: compute each layer's activations anew in the backward.
        max_grad_norm: the joint norm to which gradients are clipped (None: not at all): those of everything trained
            beside rotations, and of rotations where their step depends on the gradient's length, which it does under
            `optimizer.step_rule=paper` or with momentum.
        on_nonfinite: whether a loss or gradient that is not finite ends the run or its step alone.
        scheduler: a part of your own, by `_target_`, that schedules learning rates, instead of `lr_schedule`.
        checkpoint_every: steps between two checkpoints (None: after the last step, and when a signal ends the run).
        keep_checkpoints: how many of the newest are kept.
        async_checkpoints: write while training goes on.
    """

    steps: int = 80
    params: Trainable = Trainable.rotations
    micro_batch_size: int | None = None
    max_grad_norm: float | None = 1.0
    lr_schedule: LrSchedule = LrSchedule.cosine
    scheduler: Any = None
    warmup_steps: int = 0
    log_every: int = 1
    gradient_checkpointing: bool = False
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    checkpoint_every: int | None = 20
    keep_checkpoints: int = 2
    async_checkpoints: bool = False

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        micro, norm = self.micro_batch_size, self.max_grad_norm
        require(self.steps >= 0, "train.steps", self.steps, "0 or more", "0 evaluates without training")
        require(micro is None or micro >= 1, "train.micro_batch_size", micro, "at least 1 or null", "enlarge it")
        require(norm is None or norm > 0, "train.max_grad_norm", norm, "above 0 or null", "null switches clipping off")
        warmup = self.warmup_steps
        require(0 <= warmup <= self.steps, "train.warmup_steps", warmup, "0 to train.steps", "shorten it")
        require(self.log_every >= 1, "train.log_every", self.log_every, "at least 1", "1 logs every step")

        every, keep = self.checkpoint_every, self.keep_checkpoints
        require(
            every is None or every >= 1, "train.checkpoint_every", every, "at least 1 or null", "null saves at the end"
        )
        require(keep >= 1, "train.keep_checkpoints", keep, "at least 1", "the last complete one is never deleted")


@dataclass(frozen=True)
class AdamWConfig:
    """The optimizer of everything trained that is no rotation; the names are those of `torch.optim.AdamW`.

    Attributes:
        betas, eps, weight_decay: as in `torch.optim.AdamW`.
        lr: the learning rate of weights and norms.
        scales_lr: that of clip ratios (`train.params=rotations_and_scales`): each lies near 1 and moves by about its
            rate a step, so that a rate for weights would leave it where it is.
    """

    lr: float = 1e-5
    scales_lr: float = 1e-2
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        require(self.lr > 0, "adamw.lr", self.lr, "above 0", "the default is 1e-5")
        require(self.scales_lr > 0, "adamw.scales_lr", self.scales_lr, "above 0", "the default is 1e-2")
        betas = self.betas
        require(
            len(betas) == 2 and all(0 <= b < 1 for b in betas), "adamw.betas", betas, "two in [0, 1)", "leave them out"
        )
        require(self.eps > 0, "adamw.eps", self.eps, "above 0", "the default is 1e-8")
        require(self.weight_decay >= 0, "adamw.weight_decay", self.weight_decay, "0 or more", "0 switches it off")


@dataclass(frozen=True)
class EMAConfig:
    """An exponential moving average of everything trained.

    Attributes:
        decay: how much of the average a step keeps, in (0, 1) (None: there is no average).
    """

    decay: float | None = None

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        decay = self.decay
        require(decay is None or 0 < decay < 1, "ema.decay", decay, "between 0 and 1, or null", "null switches it off")


class Numerics(Enum):
    """What decides the order in which gradients, losses and figures are added up."""

    fast = "fast"
    exact = "exact"


@dataclass(frozen=True)
class NumericsConfig:
    """Whether a run's figures depend on how it is spread over ranks.

    Attributes:
        mode: under `exact` rotations, losses, gradient norms, checkpoints and held-out figures are the same bits for
            every sharding, world size, number of nodes and place of a micro-batch, of the same size: of one block
            unless `train.micro_batch_size` says another. Under `fast` they are the same up to rounding.
        noise_seed: moves every weight of the token embedding, as it was read, to the next number of `model.dtype`, up
            or down by that seed (None: not at all): runs that differ in it alone differ by rounding, amplified.
    """

    mode: Numerics = Numerics.fast
    noise_seed: int | None = None

    @property
    def exact(self) -> bool:
        """Whether figures are the same bits in every world."""
        return self.mode is Numerics.exact

    def validate(self) -> None:
        """Raise ValueError when an option cannot be used, whatever the other groups say."""
        seed = self.noise_seed
        require(
            seed is None or 0 <= seed < 2**32,
            "numerics.noise_seed",
            seed,
            "0 or more, below 2**32, or null",
            "null leaves the weights as they are",
        )
