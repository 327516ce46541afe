"""Only the coordinator: matrices that every rank holds whole, beside weights of your own that FSDP2 shards.

torchrun --standalone --nproc-per-node 2 examples/only_the_coordinator.py
"""

import gc

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rotexp

WIDTH, STEPS = 32, 3


class RotatedMLP(nn.Module):
    """Two linears with a rotation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.rotations = nn.ParameterDict({"between": rotexp.random_orthogonal(WIDTH, generator=generator)})

    def forward(self, x: Tensor) -> Tensor:
        """Map x: (batch, width) to (batch, width)."""
        return self.last(torch.tanh(self.first(x)) @ self.rotations["between"])


def train() -> None:
    """Keep the rotations alike: one start, one gradient, one clip, and the proof."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = RotatedMLP()
    rotations = list(model.rotations.parameters())
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(rotations))
    optimizers = [
        rotexp.CayleySGD(rotations, lr=0.05),
        torch.optim.SGD([*model.first.parameters(), *model.last.parameters()], lr=0.1),
    ]

    coordinator = rotexp.Coordinator(model, replicated=model.rotations)
    assert coordinator.divergence().names == ("between",)  # every rank drew its own
    coordinator.broadcast()
    for step in range(STEPS):
        loss = (model(torch.randn(8, WIDTH)) - 1).square().mean()
        loss.backward()
        (mean_loss,) = coordinator.consolidate(loss.detach()[None]).tolist()
        norms = coordinator.clip(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {mean_loss:.4f}, gradient norm {norms.total.item():.4f}")
    divergence = coordinator.divergence()
    assert not divergence.names, divergence.line()


def main() -> None:
    """Open the process group, train, and leave it."""
    dist.init_process_group("gloo")
    train()
    gc.collect()  # tensors of FSDP's cycles that gloo's threads freed after Python's end would abort the process
    dist.barrier()  # gloo aborts a rank whose peers leave earlier
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
