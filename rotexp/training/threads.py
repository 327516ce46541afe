"""Prove that a step of this model on this machine does not depend on how many threads compute it."""

from __future__ import annotations

import torch
from torch import Tensor

from rotexp.errors.requirements import require
from rotexp.rotation.model import RotatedModel
from rotexp.sharding.communication import Communication
from rotexp.training.objectives import Objective, Teacher


def check_threads(
    model: RotatedModel,
    objective: Objective,
    token_ids: Tensor,
    *,
    teacher: Teacher | None,
    communication: Communication,
) -> None:
    """Compare one micro-batch on one thread and on all, as `numerics=exact` needs it where `launch.threads` is null.

    Libraries promise equal bits on any number of threads to few processors (oneMKL to Intel's), and may keep them.

    Args:
        token_ids: (micro batch, tokens), the same on every rank.

    Raises:
        ValueError: loss or gradients differ on some rank; all raise alike.
    """
    threads = torch.get_num_threads()
    most = int(communication.reduce_(torch.tensor(threads, device=token_ids.device), "max"))
    if most == 1 or token_ids.device.type != "cpu":
        return
    expected = _loss_and_gradients(model, objective, token_ids, teacher)
    torch.set_num_threads(1)
    try:
        found = _loss_and_gradients(model, objective, token_ids, teacher)
    finally:
        torch.set_num_threads(threads)
    differs = any(not torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    require(
        not communication.reduce_(torch.tensor(int(differs)), "max"),
        "launch.threads",
        None,
        f"a number under numerics=exact on this machine, where a step on {most} threads differs from one on 1",
        "set launch.threads=1, or the same number in every world",
    )


def _loss_and_gradients(
    model: RotatedModel, objective: Objective, token_ids: Tensor, teacher: Teacher | None
) -> list[Tensor]:
    parameters = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    with model.mode.set(rotate=True, quantize=True):
        loss = objective(model, token_ids, teacher=teacher)
        loss.backward()  # type: ignore[no-untyped-call]
    found = [loss.detach(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]
    for parameter in parameters:
        parameter.grad = None
    return found
