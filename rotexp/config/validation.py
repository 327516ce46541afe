"""Every check of a configuration that needs no model, text or device: single values, and combinations across groups."""

from __future__ import annotations

from rotexp.config.schema import COMPONENTS, Config
from rotexp.config.targets import check_target, components_of
from rotexp.errors.requirements import require
from rotexp.models.options import ModelDtype
from rotexp.sharding.strategies import check_strategy_options, mesh_sizes, strategy_of
from rotexp.training.options import Trainable


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
    require(config.seed >= 0, "seed", config.seed, "0 or more", "choose another")
    require(config.seed < 2**32, "seed", config.seed, "below 2**32, as NumPy's generator wants it", "choose another")
    for key, component in components_of(config):
        check_target(component, key=key, plugins=config.plugins)
    config.model.validate()
    config.data.validate()
    config.quant.validate()
    config.rotation.validate()
    _validate_learned(config)
    config.train.validate()
    config.adamw.validate()
    config.ema.validate()
    config.evaluation.validate()
    config.metrics.validate()
    config.sweep.validate()
    config.sharding.validate()
    check_strategy_options(config.sharding)
    _validate_weights(config)
    config.numerics.validate()
    _validate_exact(config)
    config.sync_mode.validate()
    config.launch.validate()
    world = config.sharding.sim_world
    several = config.launch.nnodes > 1
    require(not several or world is None, "sharding.sim_world", world, "null on several nodes", "set launch.nnodes=1")
    for group in COMPONENTS:
        if hasattr(component := getattr(config, group), "validate"):
            component.validate(group)


def validate_world(config: Config, *, world_size: int) -> None:
    """Check what depends on the number of ranks.

    Raises:
        ValueError: the strategy is trivial in that world, or the global batch cannot be split over it.
    """
    minimum, simulated = strategy_of(config.sharding).minimum_world, config.sharding.sim_world
    batch = config.data.global_batch_size
    if simulated is not None:
        minimum = 1
        require(world_size == 1, "sharding.sim_world", simulated, "used in a world of one", "set launch.nproc=1")
    require(
        world_size >= minimum,
        "sharding.strategy",
        config.sharding.strategy,
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


def _validate_learned(config: Config) -> None:
    rotation, steps = config.rotation, config.train.steps
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


def _validate_exact(config: Config) -> None:
    """Check what `numerics=exact` does not add up in one order."""
    exact, params, world = config.numerics.exact, config.train.params, config.sharding.sim_world
    require(
        not (exact and params.weights and config.train.steps),
        "train.params",
        params.name,
        "rotations or rotations_and_scales under numerics=exact, since FSDP2 adds up gradients of weights as ranks lie",
        "set numerics=fast, or train.params=rotations",
    )
    require(not (exact and world), "sharding.sim_world", world, "null under numerics=exact", "set numerics=fast")


def _validate_weights(config: Config) -> None:
    """Check what concerns the training of more than rotations."""
    train = config.train
    require(
        train.params is not Trainable.rotations_and_scales or config.quant.weights.enabled,
        "train.params",
        train.params.name,
        "something else when quant.weights.bits=16, which has no scales",
        "set train.params=rotations, or another quant",
    )
    master = strategy_of(config.sharding).splits_master
    coarse = config.model.dtype in (ModelDtype.bfloat16, ModelDtype.float16)
    require(
        master or not (train.params.weights and coarse),
        "model.dtype",
        config.model.dtype.name,
        f"float32 for train.params={train.params.name}, since small updates vanish in it",
        "set sharding=zero2_master, or model.dtype=float32 with sharding.precision=bf16",
    )
