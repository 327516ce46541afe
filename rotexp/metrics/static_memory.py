"""What one rank must hold to train, whatever the batch: closed forms of shapes and ranks, known before training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.metrics.quantizer_memory import FP32_BYTES, QuantizerBytes, quantizer_bytes
from rotexp.models.arch import embedding_name, head_name
from rotexp.optim.protocol import state_bytes
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.applying import precision_policy, split_parameters
from rotexp.sharding.buckets import shard_numel
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import mesh_sizes, strategy_of

NO_QUANTIZERS = QuantizerBytes()
COPIES = 1
"""A bank is kept as training starts from it."""


@dataclass(frozen=True)
class Weight:
    """A parameter that is no rotation, of rows along its first dimension.

    Attributes:
        width: numbers of a row.
        itemsize: bytes of a number.
        trained: whether it has a gradient and AdamW's moments.
        split: whether FSDP shares its rows out.
        head: whether it is an embedding's or the output head's.
        taught: whether a teacher has it too: neither biases that took up norms', nor a head apart from its embedding.
    """

    rows: int
    width: int
    itemsize: int = FP32_BYTES
    trained: bool = False
    split: bool = False
    head: bool = False
    taught: bool = True

    def room(self, shards: int) -> int:
        """Return how many numbers each of the ranks that share it has room for, be they rows or padding."""
        return self.width * (shard_numel(self.rows, world=shards) if self.split else self.rows)

    def owned(self, shards: int, *, place: int) -> int:
        """Return how many numbers the `place`-th of the ranks that share it holds; later ones may have fewer."""
        if not self.split:
            return self.width * self.rows
        rows = shard_numel(self.rows, world=shards)
        return self.width * max(0, min(rows, self.rows - place * rows))


@dataclass(frozen=True)
class Bank:
    """The rotations, whole on every rank.

    Attributes:
        bytes: of all of them.
        trained_bytes: of those that are trained.
        state_bytes: what their optimizer keeps of them.
    """

    bytes: int = 0
    trained_bytes: int = 0
    state_bytes: int = 0


BESIDE = {"best": "in host memory what was best", "gathered": "gathered from forward to backward"}
"""What the total leaves out, in words."""


@dataclass(frozen=True)
class StaticBytes:
    """Bytes that one rank holds when the backward of a step has ended, by kind.

    Attributes:
        weights: but for the heads; with the learned scales of quantizers.
        heads: weights of the embeddings and of the output head.
        gradients: of both, as backward leaves them; the ZeRO-2 master then moves them into its shard's and frees them.
        master: the float32 shard of the ZeRO-2 master.
        shard_gradient: of that shard.
        moments: AdamW's two.
        shadows: of the average (`ema.decay`).
        teacher: the second, frozen model, where the objective asks one.
        bank: rotations, the copy of their start, their optimizer's buffers.
        bank_gradients: of the rotations.
        clip_ratios: searched, until the next search; of divided weights those of own rows alone, although a checkpoint
            that was saved or loaded since the last search keeps the whole ones beside them.
        divided_scales: of divided weights, of all their rows, from the first gather on.
        divided_sums: what own rows of divided weights have added to the rotations' gradients.
        divided_codes: own rows of divided weights as codes, with their grids, from the forward until the gradients
            are collected.
        buffers: of the network.
        best: the copy, in host memory, of the rotations and of what the rank owns of everything trained.
        gathered: whole weights that come on top from the forward to the backward; where a unit is freed after its use
            this is 0, although one unit at a time is whole.
    """

    weights: int = 0
    heads: int = 0
    gradients: int = 0
    master: int = 0
    shard_gradient: int = 0
    moments: int = 0
    shadows: int = 0
    teacher: int = 0
    bank: int = 0
    bank_gradients: int = 0
    clip_ratios: int = 0
    divided_scales: int = 0
    divided_sums: int = 0
    divided_codes: int = 0
    buffers: int = 0
    best: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """The most of all kinds at once, but `best`: gradients are there, and what was gathered is freed."""
        everything: int = sum(asdict(self).values())
        return everything - self.gathered - self.best

    @property
    def between_steps(self) -> int:
        """What remains when a step is done and its gradients are gone."""
        return self.total - self.gradients - self.shard_gradient - self.bank_gradients - self.divided_codes

    def by_kind(self) -> dict[str, int]:
        """Return it as plain values, with the total."""
        return {**asdict(self), "total": self.total}

    def line(self) -> str:
        """Return it as one line for people."""
        sizes = {name: size for name, size in asdict(self).items() if size}
        beside = [f"{BESIDE[name]} {_mib(sizes.pop(name))}" for name in BESIDE if name in sizes]
        kinds = [f"{name.replace('_', ' ')} {_mib(size)}" for name, size in sizes.items()]
        return "; ".join([f"{_mib(self.total)} MiB a rank whatever the batch: {', '.join(kinds)}", *beside])


def static_bytes(
    weights: Sequence[Weight],
    *,
    bank: Bank,
    shards: int = 1,
    place: int = 0,
    master_world: int | None = None,
    gathered_itemsize: int = 0,
    ema: bool = False,
    teacher: bool = False,
    buffers: int = 0,
    persistent_buffers: int = 0,
    quantizers: QuantizerBytes = NO_QUANTIZERS,
) -> StaticBytes:
    """Add up what the `place`-th of `shards` ranks holds.

    A weight of r rows of w numbers has room for h = ceil(r / shards) w of them on each rank, and as large a gradient;
    of those the rank owns o ≤ h, for which it has moments and a float32 shadow. With a master over N ranks, the P
    trained numbers have whole gradients, and ceil(P / N) each of master, its gradient, two moments and a shadow, all
    float32. In a strategy without shards, h = o = r w.

    Args:
        master_world: N of the ZeRO-2 master that holds every trained weight (None: there is none).
        gathered_itemsize: bytes of a number of weights that stay gathered from forward to backward (0: none do).
        buffers, persistent_buffers: bytes of all the network's, and of those that are averaged.
        quantizers: what those of weights keep.
    """
    trained = [weight for weight in weights if weight.trained]
    alone = trained if master_world is None else []
    shard = 0
    if master_world is not None:
        shard = FP32_BYTES * shard_numel(sum(weight.room(1) for weight in trained), world=master_world)
    split = [weight for weight in weights if weight.split]
    own_shadows = sum(max(FP32_BYTES, weight.itemsize) * weight.owned(shards, place=place) for weight in alone)
    return StaticBytes(
        weights=_room((weight for weight in weights if not weight.head), shards),
        heads=_room((weight for weight in weights if weight.head), shards),
        gradients=_room(trained, shards),
        master=shard,
        shard_gradient=shard,
        moments=2 * (shard + sum(weight.itemsize * weight.owned(shards, place=place) for weight in alone)),
        shadows=(shard + own_shadows + bank.trained_bytes + persistent_buffers) if ema else 0,
        teacher=(_room((weight for weight in weights if weight.taught), shards) + buffers) if teacher else 0,
        bank=(1 + COPIES) * bank.bytes + bank.state_bytes,
        bank_gradients=bank.trained_bytes,
        **asdict(quantizers),
        buffers=buffers,
        best=bank.bytes + shard + sum(weight.itemsize * weight.owned(shards, place=place) for weight in alone),
        gathered=sum(shards * weight.room(shards) for weight in split) * gathered_itemsize,
    )


def predict(
    model: RotatedModel,
    config: Config,
    *,
    world_size: int,
    rank: int = 0,
    ranks_per_node: int | None = None,
    device_type: str = "cpu",
) -> StaticBytes:
    """Return what a rank will hold while it trains a model; shapes are enough, it may still be on the meta device.

    Args:
        model: placed, what is trained chosen (`train_also`), not merged; sharded or not.
        rank: which one; none holds more than the first.
        device_type: of the ranks, which decides with the shapes whether weights are quantized by their own rows.
    """
    ranks: dict[str, Any] = {"world_size": world_size, "ranks_per_node": ranks_per_node}
    _, shards = mesh_sizes(config.sharding, **ranks)
    mastered = strategy_of(config.sharding).splits_master and config.train.params.weights
    buffers = [(buffer.numel() * buffer.element_size(), persistent) for buffer, persistent in _buffers(model.network)]
    return static_bytes(
        _weights(model, config.sharding),
        bank=_bank(model, config),
        shards=shards,
        place=rank % shards,
        master_world=config.sharding.ranks(world_size) if mastered else None,
        gathered_itemsize=_gathered_itemsize(config),
        ema=config.ema.decay is not None,
        teacher=config.train.params.weights and build(config.objective).distills,
        buffers=sum(size for size, _ in buffers),
        persistent_buffers=sum(size for size, persistent in buffers if persistent),
        quantizers=quantizer_bytes(model, config, device_type=device_type, **ranks),
    )


def _weights(model: RotatedModel, sharding: ShardingConfig) -> list[Weight]:
    """Describe every parameter that is no rotation, as `rotexp.sharding.applying.shard` treats it."""
    ends = [name for name in (embedding_name(model.network), model.spec.positions, head_name(model.network)) if name]
    heads = {parameter for name in ends for parameter in model.network.get_submodule(name).parameters()}
    rotations, scales = set(model.bank.parameters()), model.unsharded
    split = split_parameters(model.network, model.units, sharding) - scales
    return [
        Weight(
            rows=parameter.shape[:1].numel(),
            width=parameter.shape[1:].numel(),
            itemsize=parameter.element_size(),
            trained=parameter.requires_grad,
            split=parameter in split,
            head=parameter in heads,
            taught=name not in model.added and name != model.untied and parameter not in scales,
        )
        for name, parameter in model.network.named_parameters()
        if parameter not in rotations
    ]


def _bank(model: RotatedModel, config: Config) -> Bank:
    rotations = [rotation for _, rotation in model.bank.items()]
    trained = [
        nn.Parameter(torch.empty_like(rotation, device="meta")) for rotation in rotations if rotation.requires_grad
    ]
    optimizer = build(config.optimizer, trained) if trained else None
    state = sum(state_bytes(optimizer, rotation) for rotation in trained) if optimizer else 0
    return Bank(_bytes(rotations), _bytes(trained), state)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _buffers(network: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Yield every buffer once, and whether it is one of the network's state."""
    persistent = {
        buffer
        for module in network.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
    return ((buffer, buffer in persistent) for buffer in network.buffers())


def _gathered_itemsize(config: Config) -> int:
    """Return the bytes of a number of weights that are gathered and not freed before the backward."""
    if strategy_of(config.sharding).reshards_after_forward:
        return 0
    held: torch.dtype = getattr(torch, config.model.dtype.name)
    return (precision_policy(config.sharding).param_dtype or held).itemsize


def _room(weights: Iterable[Weight], shards: int) -> int:
    return sum(weight.itemsize * weight.room(shards) for weight in weights)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
