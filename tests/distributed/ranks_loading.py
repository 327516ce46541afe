"""What the ranks of the loading tests do: build, shard and read a checkpoint, watching their own memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rotexp.metrics.memory import peak_rss_bytes, reset_peaks
from rotexp.models.arch import find_spec
from rotexp.models.load import build_model, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelSource
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.sharding.applying import precision_policy, shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import whole
from rotexp.sharding.options import Precision, ShardingConfig, SyncConfig
from rotexp.training.teacher import load_teacher


def load(folder: str) -> dict[str, Any]:
    """Load the checkpoint fully sharded; return bytes, growth of the peak resident set, buffers and one weight."""
    dist.init_process_group("gloo")
    checkpoint = open_checkpoint(ModelConfig(name="hf", source=ModelSource.hf, path=folder), seed=0)
    host = torch.device("cpu")
    reset_peaks(host)
    before = peak_rss_bytes()
    network = build_model(checkpoint, dtype=torch.float32)
    model = place(network, find_spec(network), RotationConfig(name="learned"), QuantConfig(name="none"), seed=0)
    effective = shard(
        network,
        ShardingConfig("full"),
        units=model.units,
        ignored=set(model.bank.parameters()),
        device_type="cpu",
        world_size=dist.get_world_size(),
    )
    materialize(network, checkpoint, device=host, added=model.added)
    grown = peak_rss_bytes() - before
    buffers = {name: buffer.numpy() for name, buffer in network.named_buffers() if "inv_freq" in name}
    weight = whole(network.get_parameter("model.layers.1.mlp.down_proj.weight"))
    return {
        "full": effective.bytes_full,
        "local": effective.bytes_local,
        "largest": max(4 * parameter.numel() for parameter in network.parameters()),
        "grown": grown,
        "buffers": buffers,
        "down": weight.numpy(),
    }


def refuse(folder: str, strategy: str, precision: str, dtype: str) -> dict[str, Any]:
    """Load a checkpoint that cannot be; return what this rank said of it, and that it may still take part."""
    dist.init_process_group("gloo")
    communication = Communication(rank=dist.get_rank(), world_size=dist.get_world_size())
    checkpoint = open_checkpoint(ModelConfig(name="hf", source=ModelSource.hf, path=folder), seed=0)
    network = build_model(checkpoint, dtype=getattr(torch, dtype))
    config = ShardingConfig(strategy, precision=Precision[precision])
    units = [*network.get_submodule("model.layers").children()]
    shard(network, config, units=units, ignored=set(), device_type="cpu", world_size=communication.world_size)
    said = ""
    try:
        materialize(
            network,
            checkpoint,
            device=torch.device("cpu"),
            compute_dtype=precision_policy(config).param_dtype,
            communication=communication,
        )
    except ValueError as error:
        said = str(error)
    return {"said": said, "ranks": int(communication.reduce_(torch.tensor(1)))}


def refuse_teacher(folder: str, strategy: str, precision: str) -> dict[str, Any]:
    """Load a teacher whose checkpoint cannot be; return as `refuse`."""
    dist.init_process_group("gloo")
    communication = Communication(rank=dist.get_rank(), world_size=dist.get_world_size())
    model = ModelConfig(name="hf", source=ModelSource.hf, path=folder)
    config: Any = SimpleNamespace(
        model=model,
        sharding=ShardingConfig(strategy, precision=Precision[precision]),
        sync_mode=SyncConfig(),
    )
    said = ""
    try:
        load_teacher(
            open_checkpoint(model, seed=0),
            config,
            device=torch.device("cpu"),
            communication=communication,
            ranks_per_node=None,
        )
    except ValueError as error:
        said = str(error)
    return {"said": said, "ranks": int(communication.reduce_(torch.tensor(1)))}
