"""Only the guard: let the host wait after every unshard of your own FSDP2 model, and count.

torchrun --standalone --nproc-per-node 2 examples/only_the_guard.py
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rotexp

LAYERS, WIDTH, STEPS = 3, 64, 2


def train() -> None:
    """Train a small sharded model under the guard."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with rotexp.guarded(model, "universal") as guard:
        num_groups = guard.num_groups
        for _step in range(STEPS):
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    counts = guard.counts
    if dist.get_rank() == 0:
        seen = dict(counts.unshards)
        print(f"{num_groups} groups, {counts.num_unshards} unshards {seen}, {counts.barriers} waits")
    assert counts.barriers == counts.num_unshards > 0


def main() -> None:
    """Open the process group, train, and leave it."""
    dist.init_process_group("gloo")
    train()
    gc.collect()  # tensors of FSDP's cycles that gloo's threads freed after Python's end would abort the process
    dist.barrier()  # gloo aborts a rank whose peers leave earlier
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
