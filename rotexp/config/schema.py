"""The schema of every run: enums and frozen dataclasses, one a group.

Nothing here imports torch or transformers, so that `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any

from rotexp.errors.requirements import require
from rotexp.optim.options import CayleySGDOptions
from rotexp.quant.spec import QuantSpec

MISSING: Any = "???"
"""What OmegaConf takes for a value that must be given; written out, so that the library does not need OmegaConf."""


class ModelSource(Enum):
    """Where a model's structure and weights come from."""

    tiny = "tiny"
    hf = "hf"
    gguf = "gguf"
    random = "random"


class Dtype(Enum):
    """A dtype of computation or communication; rotations are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class ModelDtype(Enum):
    """The dtype a model's weights are held in; `auto` is the checkpoint's own."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class DataSource(Enum):
    """Where calibration and evaluation text come from."""

    builtin = "builtin"
    wikitext2 = "wikitext2"
    text = "text"


class RotationInit(Enum):
    """What a rotation starts from."""

    hadamard = "hadamard"
    random = "random"
    identity = "identity"


class LrSchedule(Enum):
    """How the learning rate goes from its peak over the steps (the names of `transformers.get_scheduler`)."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Strategy(Enum):
    """How parameters are split over ranks."""

    no_shard = "no_shard"
    full = "full"
    zero2 = "zero2"
    zero2_master = "zero2_master"
    hybrid = "hybrid"
    hybrid_zero2 = "hybrid_zero2"

    @property
    def two_dimensional(self) -> bool:
        """Whether parameters are split over one axis of ranks and replicated over another."""
        return self in (Strategy.hybrid, Strategy.hybrid_zero2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether gathered parameters are freed between forward and backward."""
        return self in (Strategy.full, Strategy.hybrid)

    @property
    def keeps_weights_whole(self) -> bool:
        """Whether every rank holds the whole weights, outside FSDP."""
        return self in (Strategy.no_shard, Strategy.zero2_master)


class Precision(Enum):
    """Presets of mixed precision: the dtype in which sharded parameters are gathered and computed with."""

    none = "none"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class SyncMode(Enum):
    """How unsharding is ordered before its consumers."""

    off = "off"
    selective = "selective"
    universal = "universal"
    event = "event"


OnDivergence = Enum("OnDivergence", ["log", "raise", "rebroadcast"])
"""What to do when replicas of a rotation differ (`raise` is no identifier, hence this form)."""


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


class LaunchKind(Enum):
    """Who starts the ranks."""

    auto = "auto"
    inline = "inline"
    elastic = "elastic"


class TrackerKind(Enum):
    """Where metrics go beside `metrics.jsonl`."""

    wandb = "wandb"
    jsonl = "jsonl"


class WandbMode(Enum):
    """W&B's connection; `auto` is online when a key is present, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(frozen=True)
class ModelConfig:
    """The model.

    Attributes:
        path: a hub id, a folder, or one file of safetensors, torch tensors (config.json beside them) or GGUF.
        revision: a branch, tag or commit of the hub (None: its main branch); what a run resolves is the commit.
        size: the shape of a random model.
        dtype: what its weights are held in; `auto` is the checkpoint's own.
    """

    name: str = MISSING
    source: ModelSource = MISSING
    path: str | None = None
    revision: str | None = None
    size: str | None = None
    dtype: ModelDtype = ModelDtype.float32


@dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut; lengths in tokens, batch in blocks over all ranks.

    Attributes:
        path, revision: of WikiText-2: the hub's repository or a folder, and its branch, tag or commit.
        calibration, evaluation: of your own texts: a file, a folder or a pattern such as `texts/*.txt`.
        field: which field of JSON Lines or Parquet holds the text; of plain text there is none.
        max_characters: how far each text is read (None: to its end); memory and time grow with it.
    """

    name: str = MISSING
    source: DataSource = MISSING
    path: str | None = None
    revision: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
    field: str | None = None
    max_characters: int | None = 100_000_000
    sequence_length: int = 256
    global_batch_size: int = 8


@dataclass(frozen=True)
class QuantConfig:
    """What is quantized: decoder-layer weights, the inputs of those weights, keys and values.

    Searched clip ratios are searched anew every `refresh_every` training steps.
    """

    name: str = MISSING
    weights: QuantSpec = field(default_factory=QuantSpec)
    activations: QuantSpec = field(default_factory=QuantSpec)
    kv: QuantSpec = field(default_factory=QuantSpec)
    refresh_every: int = 10

    @property
    def enabled(self) -> bool:
        """Whether anything is quantized."""
        return self.weights.enabled or self.activations.enabled or self.kv.enabled


@dataclass(frozen=True)
class RotationConfig:
    """Which rotations act, what they start from, whether they are trained.

    Attributes:
        r1, r2, r3, r4: whether to place that rotation (None: where the model lets it exist, with a warning where not).
        block_size: order of the blocks of R1 and R4, for group and microscaling formats (None: one block).
        init: what R1 and R2 start from.
        path: a file of rotations to start from instead: `rotations.safetensors` of a run, or `R.bin`.
        learned: whether R1 and R2 are trained.
    """

    name: str = MISSING
    r1: bool | None = None
    r2: bool | None = None
    r3: bool | None = False
    r4: bool | None = False
    block_size: int | None = None
    init: RotationInit = RotationInit.hadamard
    path: str | None = None
    learned: bool = True


@dataclass(frozen=True)
class CayleySGDConfig(CayleySGDOptions):
    """`optimizer=cayley_sgd`: the options of `rotexp.optim.cayley_sgd.CayleySGD`."""

    name: str = "cayley_sgd"
    _target_: str = "rotexp.optim.cayley_sgd.CayleySGD"


@dataclass(frozen=True)
class ObjectiveConfig:
    """`objective=ce` and `objective=kl`: a loss without options."""

    name: str = MISSING
    _target_: str = MISSING


@dataclass(frozen=True)
class TopKObjectiveConfig(ObjectiveConfig):
    """`objective=kl_topk`: over the float model's `k` most likely tokens."""

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
        micro_batch_size: in blocks a rank (None: all of its share of the global batch).
        max_grad_norm: the joint norm to which gradients are clipped (None: not at all): those of everything trained
            beside rotations, and of rotations where their step depends on the gradient's length, which it does under
            `optimizer.step_rule=paper` or with momentum.
        on_nonfinite: whether a loss or gradient that is not finite ends the run or its step alone.
        checkpoint_every: steps between two checkpoints (None: after the last step, and when a signal ends the run).
        keep_checkpoints: how many of the newest are kept.
        async_checkpoints: write while training goes on.
    """

    steps: int = 80
    params: Trainable = Trainable.rotations
    micro_batch_size: int | None = None
    max_grad_norm: float | None = 1.0
    lr_schedule: LrSchedule = LrSchedule.cosine
    warmup_steps: int = 0
    log_every: int = 1
    gradient_checkpointing: bool = False
    on_nonfinite: OnNonfinite = OnNonfinite.stop
    checkpoint_every: int | None = 20
    keep_checkpoints: int = 2
    async_checkpoints: bool = False


@dataclass(frozen=True)
class AdamWConfig:
    """The optimizer of everything trained that is no rotation; the names are those of `torch.optim.AdamW`.

    Attributes:
        lr: the learning rate of weights and norms.
        scales_lr: that of clip ratios (`train.params=rotations_and_scales`): each lies near 1 and moves by about its
            rate a step, so that a rate for weights would leave it where it is.
    """

    lr: float = 1e-5
    scales_lr: float = 1e-2
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass(frozen=True)
class EMAConfig:
    """An exponential moving average of everything trained; `decay` in (0, 1), None for none."""

    decay: float | None = None


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out figures on non-overlapping windows.

    Attributes:
        window: in tokens.
        max_windows: None for every one the text holds.
        micro_batch_size: windows a forward.
        every: steps between two measurements of what is trained, by whose loss the best is then chosen, before the
            first step and after the last too (None: none, and the best is chosen by the loss of a step's own batch).
            Where weights are whole it takes the memory of quantized ones beside them, as evaluation does.
    """

    window: int = 256
    max_windows: int | None = 64
    micro_batch_size: int = 1
    every: int | None = None


@dataclass(frozen=True)
class MetricsConfig:
    """How often, in steps, the costlier figures are taken: rotations' drift and replicas' divergence."""

    rotation_every: int = 10
    divergence_every: int = 10
    on_divergence: OnDivergence = OnDivergence["raise"]


@dataclass(frozen=True)
class ShardingConfig:
    """How parameters are split over ranks.

    Attributes:
        replicate, shard: sizes of the two axes of the hybrids (None: shard within a node, replicate over nodes; on one
            node two replicas).
        min_shard_size: parameters with fewer elements stay whole on every rank.
        precision: a preset for the four fields after it; each of those overrides it.
        param_dtype, reduce_dtype, output_dtype, cast_forward_inputs: as in torch's `MixedPrecisionPolicy`.
        cpu_offload: keep shards in host memory (accelerators only).
        forward_prefetch, backward_prefetch: layers gathered ahead, beside what FSDP2 does by itself.
        reshard_after_forward: size of the smaller group to which parameters are resharded after forward (None: as the
            strategy says).
        bucket_mib: size of a bucket of the ZeRO-2 master, in MiB of float32.
        sim_world: do in training what rank 0 of that many ranks would: take its share of every global batch and shard
            the master over them, in a world of one and without collectives (and the buffer, of the rotations' size, of
            one of them), to see memory and time; such a run trains a part of the weights and cannot be resumed. Tokens
            and what is made of them are those of this one rank. Held-out figures take as long as in a world of one.
    """

    strategy: Strategy = Strategy.no_shard
    replicate: int | None = None
    shard: int | None = None
    min_shard_size: int = 0
    precision: Precision = Precision.none
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    output_dtype: Dtype | None = None
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    reshard_after_forward: int | None = None
    bucket_mib: int = 64
    sim_world: int | None = None

    def ranks(self, world_size: int) -> int:
        """Return over how many ranks a global batch and the master are split, those of a simulated world included."""
        return self.sim_world or world_size


@dataclass(frozen=True)
class SyncConfig:
    """How unsharding is guarded; `states` are the training states in which `selective` waits."""

    mode: SyncMode = SyncMode.off
    states: list[str] = field(default_factory=lambda: ["forward", "pre_backward"])


@dataclass(frozen=True)
class LaunchConfig:
    """Who starts the ranks, and how many.

    Attributes:
        nproc: ranks on this node.
        nnodes: nodes, on each of which the same command is started.
        rdzv_endpoint: HOST:PORT where several nodes meet, on one of them.
        rdzv_id: what the nodes of one run call it.
        threads: of each rank (None: the cores divided by the ranks).
        grace_seconds: how long a run may take to save and end after SIGTERM, SIGUSR1 or SIGUSR2; then it is killed. A
            launcher or scheduler outside that kills sooner (torchrun and SLURM by default after 30 s) leaves less.
    """

    kind: LaunchKind = LaunchKind.auto
    nproc: int | None = None
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    rdzv_id: str = "rotexp"
    threads: int | None = None
    timeout_minutes: float = 30.0
    grace_seconds: float = 60.0


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics go beside `metrics.jsonl`."""

    kind: TrackerKind = TrackerKind.wandb
    mode: WandbMode = WandbMode.auto
    project: str = "rotexp"
    entity: str | None = None
    run_name: str | None = None
    group: str | None = None
    job_type: str = "train"
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SweepConfig:
    """How the jobs of a sweep run.

    Attributes:
        jobs_at_once: on this machine, each with its share of the accelerators and cores.
        fail_fast: whether the first job that fails ends the sweep.
        optimized_metric: where in summary.json the figure stands that a sweeper such as Optuna minimizes.
    """

    jobs_at_once: int = 1
    fail_fast: bool = False
    optimized_metric: str = "evaluation.trained.perplexity"


@dataclass(frozen=True)
class Config:
    """One run.

    Attributes:
        resume: `auto` continues an unfinished run in the same folder from its newest complete checkpoint, `never` does
            not; a folder is that of a run, or one checkpoint of it, to start from.
        profile: leave a torch profiler trace of a few steps in the run's folder, and a table of where they went.
    """

    seed: int = 0
    resume: str = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    rotation: RotationConfig = field(default_factory=RotationConfig)
    optimizer: Any = MISSING
    objective: Any = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    sync_mode: SyncConfig = field(default_factory=SyncConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    profile: bool = False


class ExportFormat(Enum):
    """What an export writes: a plain Hugging Face checkpoint, or the rotations as `R.bin`."""

    checkpoint = "checkpoint"
    r_bin = "r_bin"


class ExportDtype(Enum):
    """The dtype of exported weights; `auto` is the one the run held them in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class ExportOptions:
    """What to write and where.

    Attributes:
        path: the folder to make.
        online: export although something must run that the plain model does not.
        max_shard_size: size of one file of weights, such as 5GB.
    """

    path: str = MISSING
    format: ExportFormat = ExportFormat.checkpoint
    dtype: ExportDtype = ExportDtype.auto
    online: bool = False
    max_shard_size: str = "5GB"


@dataclass(frozen=True)
class ExportConfig:
    """One export; `run` is the folder of a finished run."""

    run: str = MISSING
    export: ExportOptions = field(default_factory=ExportOptions)


def not_given(options: Any) -> Any:
    """Return a group in which no value is given, so that it changes only what is set in it, merged into another."""
    values = {option.name: getattr(options, option.name) for option in fields(options)}
    blank = {name: not_given(value) if is_dataclass(value) else MISSING for name, value in values.items()}
    return replace(options, **blank)


@dataclass(frozen=True)
class EvaluateConfig:
    """One evaluation, of a finished run or of a model as it comes.

    What is not given is as in the run; without one it is the default, and nothing is quantized.

    Attributes:
        run: the folder of a finished run, whose model, quantizers and seed are its own.
        out: a JSON file to write.
    """

    run: str | None = None
    out: str | None = None
    seed: int = MISSING
    model: ModelConfig = field(default_factory=lambda: not_given(ModelConfig()))
    quant: QuantConfig = field(default_factory=lambda: not_given(QuantConfig()))
    data: DataConfig = field(default_factory=lambda: not_given(DataConfig()))
    evaluation: EvaluationConfig = field(default_factory=lambda: not_given(EvaluationConfig()))


COMPONENTS: dict[str, dict[str, Any]] = {
    "optimizer": {"cayley_sgd": CayleySGDConfig()},
    "objective": {
        "ce": ObjectiveConfig("ce", "rotexp.training.objectives.CrossEntropy"),
        "kl": ObjectiveConfig("kl", "rotexp.training.objectives.KLDivergence"),
        "kl_topk": TopKObjectiveConfig("kl_topk", "rotexp.training.objectives.TopKKLDivergence"),
    },
}
"""The schema of each option of a group whose options have fields of their own."""

RECORDING = (
    "sweep.",
    "tracker.",
    "resume",
    "launch.threads",
    "launch.timeout_minutes",
    "launch.grace_seconds",
    "launch.rdzv_",
)
"""Beginnings of keys that say how a run is started and recorded, and change nothing of what it computes."""

MINIMUM_WORLD = {
    Strategy.no_shard: 1,
    Strategy.full: 2,
    Strategy.zero2: 2,
    Strategy.zero2_master: 2,
    Strategy.hybrid: 4,
    Strategy.hybrid_zero2: 4,
}
"""The smallest world in which a strategy is not trivial."""
