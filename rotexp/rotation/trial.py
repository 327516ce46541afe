"""Try each rotation on a miniature of a model before any weight is read: a structure is judged by what it computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotexp.errors.library import reason
from rotexp.models.arch import ArchSpec, decoder_layers, down_widths, model_type
from rotexp.rotation.bank import RotationBank
from rotexp.rotation.invariance import relative_error, trace
from rotexp.rotation.merge import prepare
from rotexp.rotation.miniature import (
    alternatives,
    build_miniature,
    changed_by_hand,
    classes_of,
    first_layers,
    let_any_host_attend,
    make_louder,
    small_config,
)
from rotexp.rotation.mode import Mode
from rotexp.rotation.model import RotatedModel, Trace
from rotexp.rotation.options import RotationConfig, RotationInit

LIMIT = 1e-6
"""Largest error of a right rotation, relative to the largest logit or activation; in float64 it is about 1e-15."""

LOUDNESS = {"r1": (1.0, 1e6), "r2": (1.0, 1e6), "r3": (1.0,), "r4": (1.0,)}
"""Factors of what a rotation turns; the second lets limits act that rarely do.

R3 and R4 act online, and what undoes them stands right behind, so that no limit of a model comes between.
"""

BETWEEN = {
    "r1": "what writes to the residual stream and what reads it",
    "r2": "values and output",
    "r3": "rotary positions and the product of queries and keys",
    "r4": "the MLP's product and its down projection",
}
"""What each rotation acts between."""

Placing = Callable[[nn.Module, ArchSpec, RotationConfig], RotatedModel]
_alone = Lock()
"""Held during a trial: the number of threads is the whole process's."""


class BrokenModelError(ValueError):
    """A miniature cannot be run though nothing is rotated in it, and so the model cannot."""


@dataclass(frozen=True)
class Described:
    """What a trial depends on, compared by its content.

    Attributes:
        text: the config and the spec.
        num_layers: how many layers have one of each kind.
        classes: the modules' names and classes, the layers after those left out.
    """

    model_class: type
    text: str
    num_layers: int
    classes: tuple[tuple[str, type[nn.Module]], ...]
    config: Any = field(compare=False)
    spec: ArchSpec = field(compare=False)
    placing: Placing = field(compare=False)


@dataclass(frozen=True)
class Finding:
    """What a trial found: an obstacle, or why none could be looked for, or why the model does not run at all."""

    obstacle: str | None = None
    untried: str | None = None
    broken: str | None = None


class Trial:
    """The trials of one model; taken before anything is placed in it.

    Args:
        placing: places what a `RotationConfig` asks for, without a trial.
    """

    def __init__(self, model: nn.Module, spec: ArchSpec, placing: Placing) -> None:
        config: Any = model.config
        num_layers = first_layers(model, spec)
        classes = tuple(classes_of(model, spec, num_layers=num_layers).items())
        text = json.dumps([config.to_dict(), repr(spec)], default=str, sort_keys=True)
        self.prefix = f"model_type={model_type(model)}"
        self.described = Described(type(model), text, num_layers, classes, copy.deepcopy(config), spec, placing)
        self.altered = next(changed_by_hand(model), None)

    def find(self, key: str, *, block_size: int | None = None) -> Finding:
        """Try one rotation (`r1` to `r4`), once in a process for each config.

        Args:
            block_size: of R4, where it has blocks.

        Raises:
            ValueError: the model cannot be run at all; the message names its type, as those of the finding do.
        """
        with _alone:
            found = _tried(self.described, key, block_size)
        if found.broken is not None:
            raise ValueError(f"{self.prefix}: {found.broken}")
        texts = (found.obstacle, found.untried or self.altered)
        return Finding(*(None if text is None else f"{self.prefix}: {text}" for text in texts))


@lru_cache(maxsize=256)
def _tried(described: Described, key: str, block_size: int | None) -> Finding:
    with _one_thread(), torch.device("cpu"):
        try:
            config = small_config(described.config, described.spec, num_layers=described.num_layers)
            let_any_host_attend(config, described.model_class)
            fault = _fault(described, config, key, block_size)
        except BrokenModelError as error:
            return Finding(broken=str(error))
        except Exception as error:  # of whatever kind its code raises
            return Finding(untried=f"no miniature of it could be run ({reason(error)})")
        flag = None if fault is None else next(_flags(described, config, key, block_size), None)
    if fault is None:
        return Finding()
    if fault.place is None and flag is None:
        return Finding(f"a miniature of it with {key.upper()} cannot be run ({fault.change})")
    between = f"{flag or f'something in {fault.place}'} stands between {BETWEEN[key]}"
    return Finding(f"{between}, so {key.upper()} would change what it computes ({fault.change})")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread: where cores are busy, those of operations so small wait for each other for seconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Fault:
    """Where a rotation changed what a model computes, and how much of it; or no place, and what running it raised."""

    place: str | None
    change: str


def _fault(described: Described, config: Any, key: str, block_size: int | None) -> _Fault | None:
    """Return what is wrong with a rotated miniature, or None.

    Raises:
        ValueError: it does not stand for the model, or computes nothing finite.
        BrokenModelError: it cannot be run as it is.
    """
    original = build_miniature(config, seed=0)
    _require_alike(described, original)
    for factor in LOUDNESS[key]:
        if factor != 1.0:
            make_louder(original, described.spec, key, factor=factor)
        fault = _compare(original, described, key, block_size)
        if fault is not None:
            return fault
    return None


def _require_alike(described: Described, miniature: nn.Module) -> None:
    own, classes = dict(described.classes), classes_of(miniature, described.spec, num_layers=described.num_layers)
    for name in classes | own:
        found, built = own.get(name), classes.get(name)
        if found is not built:
            kinds = [getattr(kind, "__name__", "nothing") for kind in (found, built)]
            raise ValueError(f"{name or 'the model'} is {kinds[0]} where its config builds {kinds[1]}")


@torch.no_grad()
def _compare(original: Any, described: Described, key: str, block_size: int | None) -> _Fault | None:
    """Return what placing and preparing one rotation does to a miniature.

    Raises:
        ValueError: the miniature itself computes nothing finite.
        BrokenModelError: it cannot be run as it is.
    """
    spec, token_ids = described.spec, _token_ids(original.config.vocab_size)
    with _Widened():
        before = _unrotated(original, spec, token_ids)
        if not all(values.isfinite().all() for values in (before.logits, *before.layers)):
            raise ValueError("it computes nothing finite")
        try:
            placed = _placed(original, described, key, block_size)
            after = trace(placed, token_ids, rotate=True)
        except Exception as error:  # of whatever kind its code raises
            return _Fault(None, reason(error))
    if placed.rms_norms:
        before = replace(before, layers=[output - output.mean(-1, keepdim=True) for output in before.layers])
    return _first_fault(before, after, original, spec)


def _unrotated(original: Any, spec: ArchSpec, token_ids: Tensor) -> Trace:
    try:
        return trace(RotatedModel(original, spec, RotationBank(), Mode()), token_ids, rotate=False)
    except Exception as error:  # of whatever kind its code raises
        remedy = "correct its config, or choose another model"
        raise BrokenModelError(f"a miniature of it cannot be run, rotated or not ({reason(error)}); {remedy}") from None


def _placed(original: nn.Module, described: Described, key: str, block_size: int | None) -> RotatedModel:
    """Return a copy with one rotation placed, orthogonal to the last bit of float64, and prepared.

    Blocks are placed where they divide the miniature's widths: one that is as wide as the model may need them.
    """
    rotations: dict[str, Any] = dict.fromkeys(BETWEEN, False) | {key: True}
    if block_size is not None and not any(width % block_size for width in down_widths(original, described.spec)):
        rotations["block_size"] = block_size
    rotation = RotationConfig("trial", **rotations, init=RotationInit.random, learned=False)
    placed = described.placing(copy.deepcopy(original), described.spec, rotation)
    for _, matrix in placed.bank.items():
        matrix.data = torch.linalg.qr(matrix.double())[0].contiguous()
    prepare(placed)
    return placed


def _first_fault(before: Trace, after: Trace, model: nn.Module, spec: ArchSpec) -> _Fault | None:
    layers = decoder_layers(model, spec)
    places = [f"{spec.layers}.{index} ({type(layer).__name__})" for index, layer in enumerate(layers)]
    pairs = [*zip(before.layers, after.layers, strict=True), (before.logits, after.logits)]
    for place, pair in zip([*places, "what follows the last layer"], pairs, strict=True):
        error = relative_error(*pair)
        if not error <= LIMIT:
            return _Fault(place, f"{error:.1e} of it on random weights, limit {LIMIT:.0e}")
    return None


def _token_ids(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (2, 8), generator=torch.Generator().manual_seed(2))


class _Widened(TorchFunctionMode):
    """Computes in float64 what models compute in float32 (norms, softmax), so that no rounding hides a fault."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with float64 in place of float32."""
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        called: Any = Tensor.double if func is Tensor.float else func
        return called(*wide, **named)


def _flags(described: Described, small: Any, key: str, block_size: int | None) -> Iterator[str]:
    """Yield each flag of the config without which the rotation would change nothing."""
    for name, value in alternatives(described.config):
        config = copy.deepcopy(small)
        setattr(config, name, value)
        try:
            fault = _fault(described, config, key, block_size)
        except Exception:
            continue
        if fault is None:
            yield f"{name}={getattr(described.config, name)}"
