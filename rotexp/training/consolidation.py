"""How micro-batches become one gradient and one loss: added as they come, or in the order of their numbers."""

from __future__ import annotations

from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from rotexp.rotation.own_rows.division import Division
from rotexp.sharding.communication import Communication
from rotexp.sharding.ordered_sum import OrderedSum, sum_over_ranks
from rotexp.training.coordinator import Coordinator
from rotexp.training.state import TrainingState


class Consolidation(Protocol):
    """Averages gradients and losses over the micro-batches of all ranks."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's next micro-batch, and its mean loss, to the step's."""

    def means(self, flag: float) -> tuple[float, float]:
        """Leave the mean gradients in the parameters, on all ranks alike; return the mean loss and the mean flag."""


class AsTheyCome:
    """Adds up a rank's gradients in the parameters, and those of the ranks by all-reduce (`numerics=fast`)."""

    def __init__(
        self, accelerator: Accelerator, state: TrainingState, coordinator: Coordinator, division: Division
    ) -> None:
        self._accelerator = accelerator
        self._state = state
        self._coordinator = coordinator
        self._division = division
        self._loss = torch.zeros((), device=accelerator.device)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's next micro-batch, and its mean loss, to the step's."""
        self._accelerator.backward(loss)
        self._loss += loss.detach() / self._accelerator.gradient_accumulation_steps
        if not self._accelerator.sync_gradients:
            self._state.accumulate()

    def means(self, flag: float) -> tuple[float, float]:
        """Leave the mean gradients in the parameters, on all ranks alike; return the mean loss and the mean flag."""
        self._division.collect()
        numbers = torch.stack([self._loss, torch.full_like(self._loss, flag)])
        self._loss = torch.zeros_like(self._loss)
        mean_loss, mean_flag = self._coordinator.consolidate(numbers).tolist()
        return mean_loss, mean_flag


class InOrder:
    """Keeps the gradients of every micro-batch apart and adds them in the order of the batch (`numerics=exact`).

    Only whole parameters are trained then, and no weights are divided.
    """

    def __init__(self, model: nn.Module, communication: Communication, *, micro_batches: int) -> None:
        """Consolidate what of a model requires a gradient.

        Args:
            micro_batches: a rank's in one step; rank r's are neighbours in the batch, from number r * micro_batches on.
        """
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._communication = communication
        self._micro_batches = micro_batches
        self._sum = self._begin()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's next micro-batch, and its mean loss, to the step's."""
        loss.backward()  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in self._parameters]
        gradients = [
            torch.zeros_like(parameter) if grad is None else grad
            for parameter, grad in zip(self._parameters, found, strict=True)
        ]
        numbers = torch.tensor([float(grad is not None) for grad in found], device=loss.device)
        self._sum.add(torch.cat([loss.detach().reshape(1), numbers, *(grad.reshape(-1) for grad in gradients)]))
        for parameter in self._parameters:
            parameter.grad = None

    def means(self, flag: float) -> tuple[float, float]:
        """Leave the mean gradients in the parameters, on all ranks alike; return the mean loss and the mean flag."""
        communication = self._communication
        flags = communication.reduce_(torch.tensor(flag, device=self._parameters[0].device)) / communication.world_size
        total = sum_over_ranks(self._sum.totals(), count=self._micro_batches, communication=communication)
        self._sum = self._begin()
        mean = total / (self._micro_batches * communication.world_size)
        loss, present, *means = torch.split(mean, [1, len(self._parameters), *(p.numel() for p in self._parameters)])
        for parameter, values, somewhere in zip(self._parameters, means, present.tolist(), strict=True):
            parameter.grad = values.view_as(parameter).to(parameter.dtype, copy=True) if somewhere else None
        return loss.item(), flags.item()

    def _begin(self) -> OrderedSum:
        return OrderedSum(first=self._communication.rank * self._micro_batches)
