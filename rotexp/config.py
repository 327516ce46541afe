"""The schema of every run: dataclasses, their registration with Hydra, cross-field validation, checked `_target_`.

Nothing here imports torch or transformers, so that `--help` and `--cfg job` answer at once.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf

from rotexp.optim.options import CayleySGDOptions
from rotexp.quant.spec import QuantSpec


class ModelSource(Enum):
    """Where a model's structure and weights come from."""

    tiny = "tiny"
    hf = "hf"
    gguf = "gguf"
    random = "random"


class Dtype(Enum):
    """The dtype a model's weights are held in; rotations are always float32."""

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
    """The model; `path` is a hub id, a folder or a GGUF file, `size` the shape of a random one."""

    name: str = MISSING
    source: ModelSource = MISSING
    path: str | None = None
    revision: str | None = None
    size: str | None = None
    dtype: Dtype = Dtype.float32


@dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut; lengths in tokens, batch in blocks over all ranks."""

    name: str = MISSING
    source: DataSource = MISSING
    path: str | None = None
    revision: str | None = None
    calibration: str | None = None
    evaluation: str | None = None
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
    """Which rotations act, what they start from, whether they are trained."""

    name: str = MISSING
    r1: bool = True
    r2: bool = True
    r4: bool = False
    init: RotationInit = RotationInit.hadamard
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
        _require(self.k >= 1, f"{key}.k", self.k, "at least 1", "name how many tokens of the float model to compare")


@dataclass(frozen=True)
class TrainConfig:
    """The training loop; `micro_batch_size` is in blocks a rank (None: all of its share of the global batch)."""

    steps: int = 100
    micro_batch_size: int | None = None
    max_grad_norm: float | None = 1.0
    lr_schedule: LrSchedule = LrSchedule.cosine
    warmup_steps: int = 0
    log_every: int = 1
    gradient_checkpointing: bool = False


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out figures: non-overlapping windows of `window` tokens (None: every one the text holds)."""

    window: int = 256
    max_windows: int | None = 64
    micro_batch_size: int = 1


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


@dataclass(frozen=True)
class SyncConfig:
    """How unsharding is guarded; `states` are the training states in which `selective` waits."""

    mode: SyncMode = SyncMode.off
    states: list[str] = field(default_factory=lambda: ["forward", "pre_backward"])


@dataclass(frozen=True)
class LaunchConfig:
    """Who starts the ranks, how many, with how many threads each (None: the cores divided by the ranks)."""

    kind: LaunchKind = LaunchKind.auto
    nproc: int | None = None
    threads: int | None = None
    timeout_minutes: float = 30.0


@dataclass(frozen=True)
class TrackerConfig:
    """Where metrics go beside `metrics.jsonl`."""

    kind: TrackerKind = TrackerKind.wandb
    mode: WandbMode = WandbMode.auto
    project: str = "rotexp"
    run_name: str | None = None


@dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    rotation: RotationConfig = field(default_factory=RotationConfig)
    optimizer: Any = MISSING
    objective: Any = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    sync_mode: SyncConfig = field(default_factory=SyncConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)


COMPONENTS: dict[str, dict[str, Any]] = {
    "optimizer": {"cayley_sgd": CayleySGDConfig()},
    "objective": {
        "ce": ObjectiveConfig("ce", "rotexp.training.objectives.CrossEntropy"),
        "kl": ObjectiveConfig("kl", "rotexp.training.objectives.KLDivergence"),
        "kl_topk": TopKObjectiveConfig("kl_topk", "rotexp.training.objectives.TopKKLDivergence"),
    },
}
"""The schema of each option of a group whose options have fields of their own."""

ALLOWED_TARGETS = ("rotexp.optim.", "rotexp.training.objectives.")
"""Prefixes of what `_target_` may name."""

HYDRA_OVERRIDES = [{"override hydra/job_logging": "none"}, {"override hydra/hydra_logging": "none"}]
"""What every primary config must say for itself: Hydra writes no log files of its own."""

MINIMUM_WORLD = {
    Strategy.no_shard: 1,
    Strategy.full: 2,
    Strategy.zero2: 2,
    Strategy.hybrid: 4,
    Strategy.hybrid_zero2: 4,
}
"""The smallest world in which a strategy is not trivial."""


def writable(schema: Any) -> DictConfig:
    """Return the structured config of a frozen dataclass, without the read-only flag OmegaConf gives those."""
    config: DictConfig = OmegaConf.structured(schema)
    pending = [config]
    while pending:
        node = pending.pop()
        node._set_flag("readonly", None)
        pending += [child for key in node if isinstance(child := node._get_node(key), DictConfig)]
    return config


class UnknownKeyError(ValueError):
    """A key that the schema does not have."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: no such key; remove it")
        self.key = key


def to_config(composed: DictConfig) -> Config:
    """Turn Hydra's composition into frozen dataclasses, file names made absolute, and check it.

    Raises:
        ValueError: a value, or a combination of values, that cannot be used.
    """
    if OmegaConf.get_type(composed) is not Config:
        raise ValueError("the configuration is not based on the schema; begin its defaults list with `- schema`")
    if unknown := next(_unknown_keys(composed), None):
        raise UnknownKeyError(unknown)
    if missing := sorted(OmegaConf.missing_keys(composed)):
        group = missing[0].partition(".")[0]
        raise ValueError(f"{missing[0]}: has no value; choose one by {group}=OPTION, or set {missing[0]}=…")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config = dataclasses.replace(config, data=_absolute_files(config.data))
    validate(config)
    return config


def _unknown_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the keys that are in no dataclass; Hydra's `++` adds such, and files of the user's own may."""
    schema = OmegaConf.get_type(node)
    known = {option.name for option in dataclasses.fields(schema)} if dataclasses.is_dataclass(schema) else set()
    for key in node:
        if key not in known:
            yield f"{prefix}{key!s}"
        elif isinstance(child := node._get_node(key), DictConfig) and not child._is_none():
            yield from _unknown_keys(child, f"{prefix}{key}.")


def _absolute_files(data: DataConfig) -> DataConfig:
    def absolute(file: str | None) -> str | None:
        return str(Path(file).resolve()) if file else None

    return dataclasses.replace(data, calibration=absolute(data.calibration), evaluation=absolute(data.evaluation))


def to_plain(config: Config) -> dict[str, Any]:
    """Return `config` as nested dicts of plain values (enums as their names)."""
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def resolved_yaml(config: Config) -> str:
    """Return YAML that runs again: `python -m rotexp.train --config-dir DIR --config-name config.resolved`."""
    schemas = [{f"schema/{group}@{group}": getattr(config, group).name} for group in COMPONENTS]
    header = ["hydra_settings", "schema", *schemas, "_self_", *HYDRA_OVERRIDES]
    return OmegaConf.to_yaml(OmegaConf.create({"defaults": header, **to_plain(config)}))


def config_digest(config: Config) -> str:
    """Return 16 hex digits that differ when any value of the configuration differs."""
    return hashlib.sha256(json.dumps(to_plain(config), sort_keys=True).encode()).hexdigest()[:16]


def build(component: Any, *arguments: Any) -> Any:
    """Call what `component._target_` names with `arguments` and the component's other fields.

    Raises:
        ValueError: the target is not allowed; nothing was imported or called then.
    """
    module, _, name = check_target(component).rpartition(".")
    factory = getattr(importlib.import_module(module), name)
    options = {option.name: getattr(component, option.name) for option in dataclasses.fields(component)}
    return factory(*arguments, **{key: value for key, value in options.items() if key not in ("name", "_target_")})


def check_target(component: Any, *, key: str = "_target_") -> str:
    """Return the component's `_target_` if it names a class that a module of the allow-list itself defines.

    The module's text is read, not run: what it imports cannot be reached through it.

    Raises:
        ValueError: it does not.
    """
    target = str(getattr(component, "_target_", None))
    allowed = f"a class of {' or '.join(prefix.rstrip('.') for prefix in ALLOWED_TARGETS)}"
    module, _, name = target.rpartition(".")
    inside = target.startswith(ALLOWED_TARGETS) and module.count(".") == 2
    _require(inside and name in _classes(module), key, target, allowed, "leave it as the option sets it")
    return target


def _classes(module: str) -> set[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return set()
    return {node.name for node in ast.parse(Path(spec.origin).read_bytes()).body if isinstance(node, ast.ClassDef)}


def validate(config: Config) -> None:
    """Check every value and every combination that can be checked without a model, a text or a device.

    Raises:
        ValueError: one line with the key, its value, what is allowed and what to do.
    """
    _require(config.seed >= 0, "seed", config.seed, "0 or more", "choose another")
    _validate_model(config.model)
    _validate_data(config.data)
    _validate_quant(config.quant)
    _validate_rotation(config)
    _validate_train(config.train)
    _validate_evaluation(config.evaluation)
    for key in ("rotation_every", "divergence_every"):
        value = getattr(config.metrics, key)
        _require(value >= 1, f"metrics.{key}", value, "at least 1", "1 takes it every step")
    _validate_sharding(config.sharding)
    states = ("forward", "pre_backward", "post_backward", "idle")
    unknown = [state for state in config.sync_mode.states if state not in states]
    _require(not unknown, "sync_mode.states", ", ".join(unknown), f"of {', '.join(states)}", "name those to wait in")
    _validate_launch(config)
    for group in COMPONENTS:
        component = getattr(config, group)
        check_target(component, key=f"{group}._target_")
        if hasattr(component, "validate"):
            component.validate(group)


def validate_world(config: Config, *, world_size: int) -> None:
    """Check what depends on the number of ranks.

    Raises:
        ValueError: the strategy is trivial in that world, or the global batch cannot be split over it.
    """
    strategy, batch = config.sharding.strategy, config.data.global_batch_size
    minimum = MINIMUM_WORLD[strategy]
    _require(
        world_size >= minimum,
        "sharding.strategy",
        strategy.name,
        f"another with {world_size} rank(s), it needs {minimum} or more",
        f"set launch.nproc={minimum} or more, or sharding=no_shard",
    )
    mesh_sizes(config.sharding, world_size=world_size)
    _require(
        batch % world_size == 0,
        "data.global_batch_size",
        batch,
        f"a multiple of the {world_size} ranks",
        "change it or launch.nproc",
    )
    micro = config.train.micro_batch_size
    _require(
        micro is None or batch // world_size % micro == 0,
        "train.micro_batch_size",
        micro,
        f"a divisor of {batch // world_size} (data.global_batch_size={batch} over {world_size} ranks)",
        "change one of them",
    )


def mesh_sizes(sharding: ShardingConfig, *, world_size: int, ranks_per_node: int | None = None) -> tuple[int, int]:
    """Return how many replicas there are, and over how many ranks each is split.

    Args:
        ranks_per_node: where known, the hybrids shard within a node.

    Raises:
        ValueError: `replicate` times `shard` is not the number of ranks.
    """
    strategy = sharding.strategy
    if not strategy.two_dimensional:
        return (world_size, 1) if strategy is Strategy.no_shard else (1, world_size)
    replicate, shard = sharding.replicate, sharding.shard
    if replicate is None and shard is None:
        several_nodes = ranks_per_node is not None and 1 < ranks_per_node < world_size
        shard = ranks_per_node if several_nodes else world_size // 2
    replicate = replicate if replicate is not None else world_size // (shard or 1)
    shard = shard if shard is not None else world_size // replicate
    sizes = f"sharding.replicate={replicate} sharding.shard={shard}"
    if replicate * shard != world_size or min(replicate, shard) < 2:
        raise ValueError(
            f"{sizes}: their product must be the {world_size} ranks and each at least 2 for sharding={strategy.name}; "
            f"change them or launch.nproc, or use sharding=full"
        )
    return replicate, shard


def _require(condition: bool, key: str, value: object, allowed: str, remedy: str) -> None:
    if not condition:
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        raise ValueError(f"{key}={shown}: must be {allowed}; {remedy}")


def _validate_model(model: ModelConfig) -> None:
    if model.source is ModelSource.hf:
        _require(bool(model.path), "model.path", model.path, "a hub id or a folder", "set model.path=DIR_OR_HUB_ID")
    if model.source is ModelSource.random:
        sizes = "nano, 135m, 360m, 1b, 3b, 8b, 70b"
        _require(model.size in sizes.split(", "), "model.size", model.size, f"one of {sizes}", "set model.size=…")


def _validate_data(data: DataConfig) -> None:
    if data.source is DataSource.text:
        for name in ("calibration", "evaluation"):
            _require(bool(getattr(data, name)), f"data.{name}", None, "a text file", f"set data.{name}=FILE")
        _require(
            data.calibration != data.evaluation,
            "data.evaluation",
            data.evaluation,
            "another file than data.calibration",
            "held-out figures need text that was not trained on",
        )
    _require(data.sequence_length >= 2, "data.sequence_length", data.sequence_length, "at least 2", "lengthen it")
    _require(data.global_batch_size >= 1, "data.global_batch_size", data.global_batch_size, "at least 1", "enlarge it")


def _validate_quant(quant: QuantConfig) -> None:
    for name in ("weights", "activations", "kv"):
        getattr(quant, name).validate(f"quant.{name}")
    _require(quant.refresh_every >= 1, "quant.refresh_every", quant.refresh_every, "at least 1", "1 is every step")
    for name in ("activations", "kv"):
        search = getattr(quant, name).clip_search
        _require(not search, f"quant.{name}.clip_search", search, "false", "only quant.weights.clip_search can be true")


def _validate_rotation(config: Config) -> None:
    rotation, steps = config.rotation, config.train.steps
    if rotation.learned and steps:
        _require(
            rotation.r1 or rotation.r2,
            "rotation.learned",
            True,
            "false when neither rotation.r1 nor rotation.r2 is on",
            "set rotation=none, or one of the two",
        )
        _require(
            config.quant.enabled,
            "quant",
            config.quant.name,
            "something that quantizes when rotations are trained",
            "set another quant, rotation=hadamard or train.steps=0",
        )


def _validate_train(train: TrainConfig) -> None:
    micro, norm = train.micro_batch_size, train.max_grad_norm
    _require(train.steps >= 0, "train.steps", train.steps, "0 or more", "0 evaluates without training")
    _require(micro is None or micro >= 1, "train.micro_batch_size", micro, "at least 1 or null", "enlarge it")
    _require(norm is None or norm > 0, "train.max_grad_norm", norm, "above 0 or null", "null switches clipping off")
    warmup = train.warmup_steps
    _require(0 <= warmup <= train.steps, "train.warmup_steps", warmup, "0 to train.steps", "shorten it")
    _require(train.log_every >= 1, "train.log_every", train.log_every, "at least 1", "1 logs every step")


def _validate_evaluation(evaluation: EvaluationConfig) -> None:
    windows = evaluation.max_windows
    _require(evaluation.window >= 2, "evaluation.window", evaluation.window, "at least 2", "lengthen it")
    _require(windows is None or windows >= 1, "evaluation.max_windows", windows, "at least 1 or null", "enlarge it")
    micro = evaluation.micro_batch_size
    _require(micro >= 1, "evaluation.micro_batch_size", micro, "at least 1", "enlarge it")


def _validate_sharding(sharding: ShardingConfig) -> None:
    for name in ("min_shard_size", "forward_prefetch", "backward_prefetch"):
        value = getattr(sharding, name)
        _require(value >= 0, f"sharding.{name}", value, "0 or more", "0 leaves it to FSDP2")
    for name in ("replicate", "shard", "reshard_after_forward"):
        value = getattr(sharding, name)
        _require(value is None or value >= 2, f"sharding.{name}", value, "at least 2 or null", "null decides by itself")
    if not sharding.strategy.two_dimensional:
        for name in ("replicate", "shard"):
            value = getattr(sharding, name)
            _require(value is None, f"sharding.{name}", value, "null for a one-dimensional strategy", "use a hybrid")
    if not sharding.strategy.reshards_after_forward:
        group = sharding.reshard_after_forward
        _require(group is None, "sharding.reshard_after_forward", group, "null here", "use sharding=full or hybrid")
    if sharding.strategy is Strategy.no_shard:
        changed = [
            option.name
            for option in dataclasses.fields(sharding)
            if option.name != "strategy" and getattr(sharding, option.name) != option.default
        ]
        _require(not changed, "sharding", "no_shard", f"without {', '.join(changed)}", "use another sharding")


def _validate_launch(config: Config) -> None:
    launch = config.launch
    for name in ("nproc", "threads"):
        value = getattr(launch, name)
        _require(value is None or value >= 1, f"launch.{name}", value, "at least 1 or null", "null decides by itself")
    minutes = launch.timeout_minutes
    _require(0 < minutes <= 1e6, "launch.timeout_minutes", minutes, "above 0 and at most 1e6", "the default is 30")
    if launch.kind is LaunchKind.inline:
        _require(launch.nproc in (None, 1), "launch.nproc", launch.nproc, "1 for launch=inline", "use launch=elastic")
