"""Read a network's answers without holding them all: its final states once, their logits a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.models.arch import head_name, model_type
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.products import rotate_columns
from rotexp.rotation.shell import Shell, forward_of, inputs_of

CHUNK_BYTES = 64 * 2**20
"""How much memory the float32 logits of one chunk may take: 341 tokens of 49152 words, 64 of 262144."""

PROBED = 64.0
"""Up to which size logits are tried for a factor; a soft cap has bent them far below."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class FinalStates:
    """What a model's decoder layers have left in the residual stream; it takes the place of logits that are kept.

    Attributes:
        values: (batch, tokens, hidden): what the last norm reads, or the head where there is none or where it reads
            another width.
        rotated: whether R1 turns them, by mode; a merged model's always are, and are not called so.
        merged: whether they are a merged model's.
    """

    values: Tensor
    rotated: bool = False
    merged: bool = False


class Readout:
    """The end of a network inside a call of its head, when the weights of norm and head are at hand.

    Attributes:
        states: of the tokens that the network was called with.
        weight: the head's, (vocabulary, hidden).
        bias: (vocabulary,) or None.
    """

    def __init__(self, model: RotatedModel, head: nn.Module, states: FinalStates, hidden: Tensor) -> None:
        """Take what the head was called with: hidden (batch, tokens, hidden)."""
        self.states = states
        self.weight = head.get_parameter("weight")
        self.bias: Tensor | None = head._parameters.get("bias")
        self._hidden = hidden
        self._model = model
        self._norm = last_norm(model)
        self._finish = Shell(model)

    def inputs(self, states: FinalStates | None = None) -> Tensor:
        """Return what the head's weight is multiplied by, (tokens of the whole batch, hidden), with a gradient.

        Args:
            states: of the same model, in either basis (None: those of the call). If they were kept before norms were
                folded or rotations merged, they are brought to what the model computes now.
        """
        states = self.states if states is None else states
        hidden = self._hidden if states is self.states else self._normalized(states)
        residual = self._model.residual
        if states.rotated and residual is not None:
            hidden = residual.unrotate(hidden)
        return hidden.flatten(0, -2).to(self.weight.dtype)

    def _normalized(self, states: FinalStates) -> Tensor:
        values, model = states.values, self._model
        if self._norm is None:
            return values
        in_own_basis = not states.rotated and not states.merged
        if model.prepared and model.rms_norms and in_own_basis:
            wide = values.to(torch.promote_types(values.dtype, torch.float32))
            values = (wide - wide.mean(-1, keepdim=True)).to(values.dtype)  # which its norms subtract no more
        if model.merged_residual is not None and in_own_basis:
            values = rotate_columns(values, model.merged_residual.to(values.device))
        normalized: Tensor = self._norm(values)
        return normalized

    def project(self, inputs: Tensor) -> Tensor:
        """Multiply rows of `inputs()` by the head: (rows, vocabulary), of the weight's dtype."""
        return F.linear(inputs, self.weight, self.bias)

    def finish(self, projected: Tensor) -> Tensor:
        """Do what the family does behind its head (a soft cap, a factor); the same tensor where that is nothing."""
        return self._finish.logits(projected)

    def factor(self) -> float | None:
        """Return what `finish` multiplies by, 1 where it does nothing; None where it does anything else."""
        tried = torch.linspace(-PROBED, PROBED, 33, dtype=self.weight.dtype, device=self.weight.device)
        finished = self.finish(tried.unsqueeze(0)).squeeze(0)
        factor = float(finished[-1] / tried[-1])
        return factor if torch.allclose(finished, factor * tried, rtol=1e-6, atol=0.0) else None

    def chunks(self) -> Iterator[slice]:
        """Yield the rows of each chunk, in order."""
        tokens = self._hidden.flatten(0, -2).shape[0]
        rows = chunk_rows(self.weight.shape[0])
        yield from (slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows))


def chunk_rows(vocabulary: int) -> int:
    """Return of how many tokens a chunk holds the logits; one at least."""
    return max(1, CHUNK_BYTES // (vocabulary * torch.float32.itemsize))


def read(model: RotatedModel, token_ids: Tensor, work: Callable[[Readout], Result]) -> Result:
    """Run a network up to its head, as its mode says, and let `work` do what the head would, called once as a module.

    So under FSDP2 the head is gathered once, however many chunks there are. What `work` returns is the head's and the
    network's output: tensors with a gradient may be among it, in tuples, lists and dictionaries.

    Args:
        token_ids: (batch, tokens).

    Raises:
        ValueError: the head is no linear, or the network was compiled as a whole.
    """
    network, head = model.network, _linear_head(model)
    if network._compiled_call_impl is not None:
        raise ValueError("a network that was compiled as a whole cannot be read in chunks; compile its layers instead")
    rotated = model.turned_residual is not None

    def forward(token_ids: Tensor) -> Any:
        with inputs_of(last_norm(model)) as seen:
            hidden = Shell(model).hidden(token_ids)
        states = FinalStates(seen[0] if seen else hidden, rotated, merged=model.merged_residual is not None)
        with forward_of(head, lambda hidden: work(Readout(model, head, states, hidden))):
            return head(hidden)

    with forward_of(network, forward):
        result: Result = network(token_ids)
    return result


def reread(model: RotatedModel, states: FinalStates, work: Callable[[Readout], Result]) -> Result:
    """Do as `read`, from final states that were kept: of the network only the last norm and the head run.

    Args:
        states: of this model, which has neither been prepared nor merged since.
    """
    network, head, norm = model.network, _linear_head(model), last_norm(model)

    def forward(values: Tensor) -> Any:
        hidden = values if norm is None else norm(values)
        with forward_of(head, lambda hidden: work(Readout(model, head, states, hidden))):
            return head(hidden)

    with forward_of(network, forward):
        result: Result = network(states.values)
    return result


def _linear_head(model: RotatedModel) -> nn.Module:
    network = model.network
    head = network.get_submodule(head_name(network))
    if type(head).forward not in (nn.Linear.forward, RotatedLinear.forward):
        kind = type(head).__name__
        raise ValueError(f"model_type={model_type(network)}: its head is a {kind}, where a Linear is needed")
    return head


@torch.no_grad()
def final_states(model: RotatedModel, token_ids: Tensor) -> FinalStates:
    """Return what the decoder layers make of token ids (batch, tokens) in the model's mode.

    Raises:
        ValueError: as `read`.
    """
    found: list[FinalStates] = []

    def work(readout: Readout) -> Tensor:
        found.append(readout.states)
        return readout.states.values

    read(model, token_ids, work)
    return found[0]


def last_norm(model: RotatedModel) -> nn.Module | None:
    """Return the norm between the residual stream and the head, None where there is none, or more than that."""
    modules = dict(model.network.named_modules())
    pattern = model.spec.projections
    if pattern and any(fnmatchcase(name, pattern) for name in modules):
        return None
    return modules.get(model.spec.final_norm or "")
