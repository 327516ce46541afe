"""Run a network's own forward around stand-ins for its decoder or its head, so that either comes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rotexp.models.arch import head_name
from rotexp.rotation.model import RotatedModel


class Shell:
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
def forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
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
def inputs_of(module: nn.Module | None) -> Iterator[list[Tensor]]:
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
