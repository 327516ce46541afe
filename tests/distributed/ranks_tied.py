"""What the ranks of the tied head's tests do: shard a tied model without R1, and compare it with the whole one."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks_families import FAMILIES, Loaded, from_config, logits, make_token_ids
from ranks_trainable import gradients
from torch import Tensor, nn

from rotexp.models.arch import embedding_name, find_spec, is_tied
from rotexp.models.load import build_model
from rotexp.models.materialize import materialize
from rotexp.models.stored_model import StoredModel
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.invariance import relative_error
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.placement import place
from rotexp.rotation.trainable import train_also
from rotexp.sharding.applying import shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.digest import weights_digest
from rotexp.sharding.guard import install, param_groups
from rotexp.sharding.options import ShardingConfig, SyncConfig, SyncMode
from rotexp.training.options import Trainable

ROTATION = RotationConfig(r1=None, r2=True, r3=False, r4=True, init=RotationInit.random)
OPTIONS = {
    "gemma3 with sliding layers": ROTATION,
    "olmo2": ROTATION,
    "llama": RotationConfig(r1=False, r2=True, r3=False, r4=True, init=RotationInit.random),
}
EIGHT_BITS = QuantSpec(8, symmetric=False)
QUANT = QuantConfig(weights=EIGHT_BITS, activations=EIGHT_BITS)
BATCH, VOCABULARY = 4, 67
"""The vocabulary is not even, so that the last rank has fewer rows and padding."""


def make_source(name: str) -> Any:
    return from_config(FAMILIES[name].config(tie_word_embeddings=True, vocab_size=VOCABULARY))


def placed(network: Any, name: str) -> RotatedModel:
    model = place(network, find_spec(network), OPTIONS[name], QUANT, seed=0)
    train_also(model, Trainable.all)
    return model


def load_sharded(source: Any, name: str, strategy: str) -> RotatedModel:
    """Build a source model anew without memory, place, shard, guard and read it, as a run does."""
    names = {"lm_head.weight": "model.embed_tokens.weight"}
    checkpoint: Any = StoredModel("tied", source.config, Loaded(dict(source.named_parameters())), "", aliases=names)
    network = build_model(checkpoint, dtype=torch.float32)
    model = placed(network, name)
    shard(
        network,
        ShardingConfig(strategy, forward_prefetch=1, backward_prefetch=1),
        units=model.units,
        ignored=model.unsharded,
        device_type="cpu",
        world_size=dist.get_world_size(),
    )
    guard = install(network, SyncConfig(SyncMode.universal))
    materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
    if guard is not None:
        guard.remove()
    return model


def local_bytes(network: nn.Module) -> int:
    """Return the bytes of the storages that this rank's parts lie in, each once."""
    local = [getattr(parameter, "_local_tensor", parameter) for parameter in network.parameters()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def compare(name: str, strategy: str) -> dict[str, Any]:
    """Return how far a sharded model is from its source, and what it holds."""
    source, token_ids = make_source(name), make_token_ids(rows=BATCH)
    alone, model = both = placed(copy.deepcopy(source), name), load_sharded(source, name, strategy)
    group, ignored = Communication(rank=dist.get_rank(), world_size=dist.get_world_size()), model.unsharded
    found: dict[str, Any] = {
        "digests": [weights_digest(each.network, communication=group, ignored=each.unsharded) for each in both],
        "bytes": local_bytes(model.network),
        "room": sum(_room(p) for p in source.parameters()) + sum(p.nbytes for p in ignored),
        "tied": is_tied(model.network),
        "groups": len(param_groups(model.network)),
        "layers": len(model.units) - 2,
    }
    original = source(token_ids, use_cache=False).logits
    errors = {"loaded": relative_error(original, logits(model, token_ids, rotate=False))}
    for each in both:
        prepare(each)
    errors["prepared"] = relative_error(original, logits(model, token_ids))
    share = token_ids[dist.get_rank() * (BATCH // 2) :][: BATCH // 2]
    embedding = f"{embedding_name(source)}.weight"
    expected, sharded = gradients(alone, token_ids, over_ranks=False), gradients(model, share, over_ranks=True)
    found["trained"] = (model.trained_names == alone.trained_names, "lm_head.weight" in model.trained_names)
    errors["gradient"] = relative_error(expected[embedding], sharded[embedding])
    merge(model)
    errors["merged"] = relative_error(original, logits(model, token_ids))
    return found | {"errors": errors, "still tied": is_tied(model.network)}


def _room(parameter: Tensor) -> int:
    """Return the bytes of a rank's share of the rows, padding included."""
    rows = -(-parameter.shape[0] // dist.get_world_size())
    return rows * parameter[0].numel() * parameter.element_size()


def compare_all(cases: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Compare families under strategies, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return {case: compare(case[0], case[1]) for case in cases}
