"""Every check of a configuration that needs no model, text or device: single values, and combinations across groups."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rotexp.config.schema import (
    COMPONENTS,
    MINIMUM_WORLD,
    Config,
    DataConfig,
    DataSource,
    EvaluationConfig,
    LaunchKind,
    ModelConfig,
    ModelDtype,
    ModelSource,
    QuantConfig,
    ShardingConfig,
    Strategy,
    Trainable,
    TrainConfig,
)
from rotexp.config.targets import check_target
from rotexp.errors.requirements import require

MASTER_OPTIONS = ("bucket_mib", "sim_world")
"""Options of `sharding` that only the ZeRO-2 master has."""

KEYS_OF_SOURCE = {
    DataSource.wikitext2: ("path", "revision"),
    DataSource.text: ("calibration", "evaluation", "field"),
}
"""Options of `data` that only one source reads, and which are null where another is chosen."""


def validate(config: Config) -> None:
    """Check every value and every combination that can be checked without a model, a text or a device.

    Raises:
        ValueError: one line with the key, its value, what is allowed and what to do.
    """
    trains = config.train.steps > 0 and (config.rotation.learned or config.train.params is not Trainable.rotations)
    require(
        config.resume in ("auto", "never") or (trains and config.sharding.sim_world is None),
        "resume",
        config.resume,
        "auto or never where nothing is trained, or the world is simulated",
        "leave it out",
    )
    require(bool(config.resume), "resume", config.resume, "auto, never or a folder", "leave it out")
    require(
        config.sweep.jobs_at_once >= 1, "sweep.jobs_at_once", config.sweep.jobs_at_once, "at least 1", "leave it out"
    )
    require(config.seed >= 0, "seed", config.seed, "0 or more", "choose another")
    require(config.seed < 2**32, "seed", config.seed, "below 2**32, as NumPy's generator wants it", "choose another")
    _validate_model(config.model)
    _validate_data(config.data)
    _validate_quant(config.quant)
    _validate_rotation(config)
    _validate_train(config.train)
    _validate_weights(config)
    _validate_evaluation(config.evaluation)
    for key in ("rotation_every", "divergence_every"):
        value = getattr(config.metrics, key)
        require(value >= 1, f"metrics.{key}", value, "at least 1", "1 takes it every step")
    _validate_sharding(config.sharding)
    states = ("forward", "pre_backward", "post_backward", "idle")
    unknown = [state for state in config.sync_mode.states if state not in states]
    require(not unknown, "sync_mode.states", ", ".join(unknown), f"of {', '.join(states)}", "name those to wait in")
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
    minimum, simulated = MINIMUM_WORLD[strategy], config.sharding.sim_world
    if simulated is not None:
        minimum = 1
        require(world_size == 1, "sharding.sim_world", simulated, "used in a world of one", "set launch.nproc=1")
    require(
        world_size >= minimum,
        "sharding.strategy",
        strategy.name,
        f"in a world of {minimum} or more ranks, not {world_size}",
        f"set launch.nproc={minimum} or more, or sharding=no_shard",
    )
    mesh_sizes(config.sharding, world_size=world_size)
    ranks = config.sharding.ranks(world_size)
    named = f"{ranks} ranks" if simulated is None else f"{ranks} simulated ranks"
    require(
        batch % ranks == 0,
        "data.global_batch_size",
        batch,
        f"a multiple of the {named}",
        f"change it or {'launch.nproc' if simulated is None else 'sharding.sim_world'}",
    )
    micro = config.train.micro_batch_size
    require(
        micro is None or batch // ranks % micro == 0,
        "train.micro_batch_size",
        micro,
        f"a divisor of {batch // ranks} (data.global_batch_size={batch} over {named})",
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
        return (world_size, 1) if strategy.keeps_weights_whole else (1, world_size)
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


def _validate_model(model: ModelConfig) -> None:
    if model.source is ModelSource.hf:
        require(bool(model.path), "model.path", model.path, "a hub id or a folder", "set model.path=DIR_OR_HUB_ID")
    if model.source in (ModelSource.tiny, ModelSource.random):
        remedy = f"set model=hf model.path={model.path} to run that model"
        require(model.path is None, "model.path", model.path, f"null for model={model.name}", remedy)
    if model.source is not ModelSource.hf:
        allowed = f"null for model={model.name}, which is not fetched from the hub"
        require(model.revision is None, "model.revision", model.revision, allowed, "leave it out")
    if model.source is ModelSource.random:
        sizes = "nano, 135m, 360m, 1b, 3b, 8b, 70b"
        require(model.size in sizes.split(", "), "model.size", model.size, f"one of {sizes}", "set model.size=…")


def _validate_data(data: DataConfig) -> None:
    for source, keys in KEYS_OF_SOURCE.items():
        for key in keys if source is not data.source else ():
            allowed = f"null for data={data.name}, which does not read it"
            require(getattr(data, key) is None, f"data.{key}", getattr(data, key), allowed, f"set data={source.name}")
    if data.source is DataSource.text:
        for name in ("calibration", "evaluation"):
            require(bool(getattr(data, name)), f"data.{name}", None, "a text file", f"set data.{name}=FILE")
        same = Path(str(data.calibration)).resolve() == Path(str(data.evaluation)).resolve()
        require(
            not same,
            "data.evaluation",
            data.evaluation,
            "another file than data.calibration",
            "held-out figures need text that was not trained on",
        )
        require(data.field != "", "data.field", data.field, "a field's name or null", "null is plain text")
    limit = data.max_characters
    require(limit is None or limit >= 1, "data.max_characters", limit, "at least 1 or null", "null reads all")
    require(data.sequence_length >= 2, "data.sequence_length", data.sequence_length, "at least 2", "lengthen it")
    require(data.global_batch_size >= 1, "data.global_batch_size", data.global_batch_size, "at least 1", "enlarge it")


def _validate_quant(quant: QuantConfig) -> None:
    for name in ("weights", "activations", "kv"):
        getattr(quant, name).validate(f"quant.{name}")
    require(quant.refresh_every >= 1, "quant.refresh_every", quant.refresh_every, "at least 1", "1 is every step")
    for name in ("activations", "kv"):
        search = getattr(quant, name).clip_search
        require(not search, f"quant.{name}.clip_search", search, "false", "only quant.weights.clip_search can be true")


def _validate_rotation(config: Config) -> None:
    rotation, steps = config.rotation, config.train.steps
    size = rotation.block_size
    require(size is None or size >= 2, "rotation.block_size", size, "at least 2 or null", "null is one block")
    if rotation.learned and steps:
        require(
            (rotation.r1, rotation.r2) != (False, False),
            "rotation.learned",
            True,
            "false when neither rotation.r1 nor rotation.r2 is on",
            "set rotation=none, or one of the two",
        )
        require(
            config.quant.enabled,
            "quant",
            config.quant.name,
            "something that quantizes when rotations are trained",
            "set another quant, rotation=hadamard or train.steps=0",
        )


def _validate_train(train: TrainConfig) -> None:
    micro, norm = train.micro_batch_size, train.max_grad_norm
    require(train.steps >= 0, "train.steps", train.steps, "0 or more", "0 evaluates without training")
    require(micro is None or micro >= 1, "train.micro_batch_size", micro, "at least 1 or null", "enlarge it")
    require(norm is None or norm > 0, "train.max_grad_norm", norm, "above 0 or null", "null switches clipping off")
    warmup = train.warmup_steps
    require(0 <= warmup <= train.steps, "train.warmup_steps", warmup, "0 to train.steps", "shorten it")
    require(train.log_every >= 1, "train.log_every", train.log_every, "at least 1", "1 logs every step")

    every, keep = train.checkpoint_every, train.keep_checkpoints
    require(every is None or every >= 1, "train.checkpoint_every", every, "at least 1 or null", "null saves at the end")
    require(keep >= 1, "train.keep_checkpoints", keep, "at least 1", "the last complete one is never deleted")


def _validate_weights(config: Config) -> None:
    """Check what concerns the training of more than rotations."""
    train, adamw, decay = config.train, config.adamw, config.ema.decay
    require(adamw.lr > 0, "adamw.lr", adamw.lr, "above 0", "the default is 1e-5")
    require(adamw.scales_lr > 0, "adamw.scales_lr", adamw.scales_lr, "above 0", "the default is 1e-2")
    betas = adamw.betas
    require(len(betas) == 2 and all(0 <= b < 1 for b in betas), "adamw.betas", betas, "two in [0, 1)", "leave them out")
    require(adamw.eps > 0, "adamw.eps", adamw.eps, "above 0", "the default is 1e-8")
    require(adamw.weight_decay >= 0, "adamw.weight_decay", adamw.weight_decay, "0 or more", "0 switches it off")
    require(decay is None or 0 < decay < 1, "ema.decay", decay, "between 0 and 1, or null", "null switches it off")
    require(
        train.params is not Trainable.rotations_and_scales or config.quant.weights.enabled,
        "train.params",
        train.params.name,
        "something else when quant.weights.bits=16, which has no scales",
        "set train.params=rotations, or another quant",
    )
    master = config.sharding.strategy is Strategy.zero2_master
    coarse = config.model.dtype in (ModelDtype.bfloat16, ModelDtype.float16)
    require(
        master or not (train.params.weights and coarse),
        "model.dtype",
        config.model.dtype.name,
        f"float32 for train.params={train.params.name}, since small updates vanish in it",
        "set sharding=zero2_master, or model.dtype=float32 with sharding.precision=bf16",
    )


def _validate_evaluation(evaluation: EvaluationConfig) -> None:
    windows = evaluation.max_windows
    require(evaluation.window >= 2, "evaluation.window", evaluation.window, "at least 2", "lengthen it")
    require(windows is None or windows >= 1, "evaluation.max_windows", windows, "at least 1 or null", "enlarge it")
    micro = evaluation.micro_batch_size
    require(micro >= 1, "evaluation.micro_batch_size", micro, "at least 1", "enlarge it")
    every = evaluation.every
    require(every is None or every >= 1, "evaluation.every", every, "at least 1 or null", "null measures at the end")


def _validate_sharding(sharding: ShardingConfig) -> None:
    for name in ("min_shard_size", "forward_prefetch", "backward_prefetch"):
        value = getattr(sharding, name)
        require(value >= 0, f"sharding.{name}", value, "0 or more", "0 leaves it to FSDP2")
    for name in ("replicate", "shard", "reshard_after_forward"):
        value = getattr(sharding, name)
        require(value is None or value >= 2, f"sharding.{name}", value, "at least 2 or null", "null decides by itself")
    if not sharding.strategy.two_dimensional:
        for name in ("replicate", "shard"):
            value = getattr(sharding, name)
            require(value is None, f"sharding.{name}", value, "null for a one-dimensional strategy", "use a hybrid")
    if not sharding.strategy.reshards_after_forward:
        group = sharding.reshard_after_forward
        require(group is None, "sharding.reshard_after_forward", group, "null here", "use sharding=full or hybrid")
    require(sharding.bucket_mib >= 1, "sharding.bucket_mib", sharding.bucket_mib, "at least 1", "the default is 64")
    world = sharding.sim_world
    require(world is None or world >= 2, "sharding.sim_world", world, "at least 2 or null", "null simulates nothing")
    if sharding.strategy.keeps_weights_whole:
        used = {"strategy", *MASTER_OPTIONS} if sharding.strategy is Strategy.zero2_master else {"strategy"}
        changed = [
            option.name
            for option in dataclasses.fields(sharding)
            if option.name not in used and getattr(sharding, option.name) != option.default
        ]
        name = sharding.strategy.name
        require(not changed, "sharding", name, f"without {', '.join(changed)}", "use another sharding")
    elif any(getattr(sharding, name) != getattr(ShardingConfig, name) for name in MASTER_OPTIONS):
        options = " and ".join(f"sharding.{name}" for name in MASTER_OPTIONS)
        require(False, "sharding", sharding.strategy.name, f"without {options}", "use sharding=zero2_master")


def _validate_launch(config: Config) -> None:
    launch = config.launch
    for name in ("nproc", "threads"):
        value = getattr(launch, name)
        require(value is None or value >= 1, f"launch.{name}", value, "at least 1 or null", "null decides by itself")
    require(launch.nnodes >= 1, "launch.nnodes", launch.nnodes, "at least 1", "1 is this machine alone")
    if launch.nnodes > 1:
        world = config.sharding.sim_world
        require(world is None, "sharding.sim_world", world, "null on several nodes", "set launch.nnodes=1")
        require(
            launch.kind is LaunchKind.elastic and bool(launch.rdzv_endpoint),
            "launch.nnodes",
            launch.nnodes,
            "1 unless launch=elastic and launch.rdzv_endpoint=HOST:PORT are given",
            "give both, or start the nodes by torchrun or srun",
        )
    minutes = launch.timeout_minutes
    require(0 < minutes <= 1e6, "launch.timeout_minutes", minutes, "above 0 and at most 1e6", "the default is 30")
    grace = launch.grace_seconds
    require(0 < grace <= 1e6, "launch.grace_seconds", grace, "above 0 and at most 1e6", "the default is 60")
    if launch.kind is LaunchKind.inline:
        require(launch.nproc in (None, 1), "launch.nproc", launch.nproc, "1 for launch=inline", "use launch=elastic")
