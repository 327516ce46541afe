"""What the ranks of the tests of `import rotexp` do: a model of the user's own, sharded by the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig

import rotexp

TOKENS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 80}


def own_model() -> Any:
    """Return a small Llama, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=48, tie_word_embeddings=False, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def place_shard_train_merge_save(folder: Path) -> dict[str, Any]:
    """Do in one's own loop what the guide says; return losses, rotations before the merge, and refusals."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    model = own_model()
    placed = rotexp.place(model)
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,))
        for unit in placed.units:
            fully_shard(unit, mesh=mesh, ignored_params=placed.unsharded)
        fully_shard(model, mesh=mesh, ignored_params=placed.unsharded)
        assert all(
            isinstance(model.get_parameter(f"model.layers.{layer}.mlp.up_proj.weight"), DTensor) for layer in (0, 1)
        )
    proof = rotexp.prepare(placed)
    coordinator = rotexp.Coordinator(model)
    coordinator.broadcast()
    optimizer = rotexp.CayleySGD(placed.bank.parameters(), lr=0.05)
    mine = TOKENS.chunk(ranks)[dist.get_rank()]
    losses = []
    with placed.mode.set(rotate=True, quantize=True):
        for _step in range(2):
            loss = model(mine, labels=mine).loss
            loss.backward()
            losses += coordinator.consolidate(loss.detach()[None]).tolist()
            optimizer.step()
            optimizer.zero_grad()
    diverged, rotations = coordinator.divergence().names, placed.bank.snapshot()
    merged = rotexp.merge(placed)
    rotexp.export(placed, folder / f"saved-{ranks}")
    return {"proof": proof, "merged": merged, "losses": losses, "diverged": diverged, "rotations": rotations}


def refuse_what_is_sharded() -> str:
    """Place after sharding; return what that is answered."""
    dist.init_process_group("gloo")
    model = own_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        rotexp.place(model)
    except ValueError as error:
        return str(error)
    return "placed"
