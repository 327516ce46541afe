"""Read a network's answers without holding them all: its final states once, their logits a few tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
        rotated: whether they are in R1's basis, by mode; a merged model's always are, and are not called so.
        merged: whether they are a merged model's.
    """

    values: Tensor
    rotated: bool = False
    merged: bool = False


Measure = Callable[[Sequence[Tensor], slice], Tensor]
"""Maps logits of a chunk, one (rows, vocabulary) float32 for each of some states, and the rows that these are among all
tokens of the batch in order, to a few figures a row: (rows, figures). It may overwrite the logits."""


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
        self._finish = _Shell(model)

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
            values = values - values.mean(-1, keepdim=True)  # which its norms subtract no more
        if model.merged_residual is not None and in_own_basis:
            values = rotate_columns(values, model.merged_residual)
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

    @torch.no_grad()
    def measure(self, measure: Measure, beside: Sequence[FinalStates] = ()) -> Tensor:
        """Return the figures of all tokens, (batch, tokens, figures), the logits chunk by chunk.

        Args:
            beside: more states of the same tokens, whose logits `measure` is given behind those of the call.
        """
        inputs = [self.inputs(), *map(self.inputs, beside)]
        figures = [
            measure([self.finish(self.project(each[rows])).float() for each in inputs], rows) for rows in self.chunks()
        ]
        return torch.unflatten(torch.cat(figures), 0, self._hidden.shape[:-1])


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
        ValueError: the head is no linear.
    """
    network, head = model.network, _linear_head(model)
    rotated = model.mode.rotate and model.residual is not None

    def forward(token_ids: Tensor) -> Any:
        with _inputs_of(last_norm(model)) as seen:
            hidden = _Shell(model).hidden(token_ids)
        states = FinalStates(seen[0] if seen else hidden, rotated, merged=model.merged_residual is not None)
        with _forward_of(head, lambda hidden: work(Readout(model, head, states, hidden))):
            return head(hidden)

    with _forward_of(network, forward):
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
        with _forward_of(head, lambda hidden: work(Readout(model, head, states, hidden))):
            return head(hidden)

    with _forward_of(network, forward):
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
def measure(
    model: RotatedModel, token_ids: Tensor, figures: Measure, *, beside: Sequence[FinalStates] = ()
) -> tuple[Tensor, FinalStates]:
    """Return figures of every token, (batch, tokens, figures), and the final states they were read from.

    The logits differ from whole ones by rounding alone, in float32 by at most 1e-5 of the largest: a matrix product
    rounds otherwise for another number of rows.

    Args:
        token_ids: (batch, tokens).
        figures: what is measured of a chunk of logits.
        beside: final states of the same tokens, of this model in another mode or of another time: `figures` gets their
            logits, too, in this order. The head is taken as it is now and without quantization, as it always is.

    Raises:
        ValueError: as `read`.
    """
    found: list[tuple[Tensor, FinalStates]] = []  # beside what the network returns, which a policy may cast

    def work(readout: Readout) -> Tensor:
        found.append((readout.measure(figures, beside), readout.states))
        return found[0][0]

    read(model, token_ids, work)
    return found[0]


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


class _Shell:
    """A network's own forward, run around stand-ins for its decoder or its head."""

    def __init__(self, model: RotatedModel) -> None:
        self._network: Any = model.network
        self._decoder = model.spec.layers.split(".")[0]
        self._head = head_name(model.network)

    def hidden(self, token_ids: Tensor) -> Tensor:
        """Return what the head would be called with: (batch, tokens, hidden)."""
        seen: list[Tensor] = []

        def head(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            return hidden

        self._forward({self._head: head}, token_ids)
        return seen[0]

    def logits(self, projected: Tensor) -> Tensor:
        """Return the logits that come of what the head returns for some tokens: both (tokens, vocabulary)."""
        batch = projected.unsqueeze(0)
        logits = self._forward({self._decoder: _Decoder(batch), self._head: lambda _hidden: batch}, None).logits
        return projected if logits is batch else logits.squeeze(0)

    def _forward(self, stand_ins: dict[str, Any], token_ids: Tensor | None) -> Any:
        network = self._network
        shell = object.__new__(type(network))
        shell.__dict__.update(network.__dict__)
        shell.__dict__["_modules"] = {**network._modules, **stand_ins}
        return type(network).forward(shell, token_ids, use_cache=False)


class _Decoder:
    """Stands for a decoder, or for one inside of it, that has computed some states already."""

    def __init__(self, states: Tensor) -> None:
        self._states = states

    def __getattr__(self, _name: str) -> _Decoder:
        return self

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return _Output(self._states)


class _Output:
    """A decoder's output of which nothing but the last hidden state is known."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, _index: int) -> Tensor:
        return self.last_hidden_state

    def __getattr__(self, _name: str) -> None:
        return None


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else inside the block; its hooks stay."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextmanager
def _inputs_of(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """Collect what a module is called with inside the block."""
    seen: list[Tensor] = []
    if module is None:
        yield seen
        return
    hook = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        hook.remove()
