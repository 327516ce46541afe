"""Guard every unshard of managed models at the one point they all pass, `FSDPParamGroup.wait_for_unshard`.

FSDP2 gathers a parameter, a consumer reads it, the reshard frees it. Where a stack does not enforce that order for
every consumer, `universal` and `selective` make the host wait, `event` orders the device's streams instead.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from rotexp.errors.requirements import require
from rotexp.sharding.fsdp_internals import ALLOWED_TORCH, GUARD, STREAMS, TESTED, check_internals
from rotexp.sharding.options import SyncConfig, SyncMode


@dataclass(frozen=True)
class Policy:
    """What the guard does for one parameter group: the states in which the host waits, whether streams are ordered."""

    states: frozenset[TrainingState]
    event: bool

    def merged(self, other: Policy) -> Policy:
        """Return the policy that does what either does."""
        return Policy(self.states | other.states, self.event or other.event)


@dataclass
class GuardCounts:
    """What the guard saw and did since it was installed."""

    unshards: Counter[str] = field(default_factory=Counter)
    barriers: int = 0
    seconds: float = 0.0

    @property
    def num_unshards(self) -> int:
        """Pending all-gathers in all training states."""
        return self.unshards.total()


class UnshardGuard:
    """The wrapped methods of `FSDPParamGroup`, and the groups they act on; groups of other models pass untouched.

    Attributes:
        counts: what was seen and done.
        groups: how many parameter groups each model has that was given to it, by the name it was given by.
    """

    def __init__(self) -> None:
        self.counts = GuardCounts()
        self.groups: dict[str, int] = {}
        self._policies: WeakKeyDictionary[Any, list[tuple[str, Policy]]] = WeakKeyDictionary()
        self._originals: dict[str, Callable[..., Any]] = {}

    @property
    def num_groups(self) -> int:
        """Parameter groups that are guarded."""
        return len(self._policies)

    def manage(self, model: nn.Module, config: SyncConfig, *, name: str) -> None:
        """Guard the parameter groups of a sharded model, beside what they are guarded by already."""
        policy = policy_of(config)
        for group in param_groups(model):
            self._policies.setdefault(group, []).append((name, policy))
        self.groups[name] = self._num_groups(name)

    def unmanage(self, groups: Iterable[Any], policy: Policy, *, name: str) -> None:
        """Take back one `manage` of these groups; what else guards them stays."""
        for group in groups:
            self._policies[group].remove((name, policy))
            if not self._policies[group]:
                del self._policies[group]
        self.groups[name] = self._num_groups(name)

    def _num_groups(self, name: str) -> int:
        return sum(any(name == given for given, _ in policies) for policies in self._policies.values())

    def line(self, name: str, config: SyncConfig) -> str:
        """Say for people how many groups of a model are guarded."""
        return f"sync_mode={config.mode.name}: {self.groups[name]} parameter groups of {name} are guarded"

    def remove(self) -> None:
        """Leave the class as it was before."""
        for name, original in self._originals.items():
            setattr(_fsdp_param_group.FSDPParamGroup, name, original)
        self._originals.clear()

    def _policy(self, group: Any) -> Policy | None:
        """Return what is done for a group by all that guards it."""
        policies = [policy for _, policy in self._policies.get(group, ())]
        return functools.reduce(Policy.merged, policies) if policies else None

    def _wrap(self) -> None:
        group_class = _fsdp_param_group.FSDPParamGroup
        wrappers = {"wait_for_unshard": self._wait_for_unshard, "reshard": self._reshard}
        for name, wrapper in wrappers.items():
            original = getattr(group_class, name)
            self._originals[name] = original
            setattr(group_class, name, _bound(wrapper, original, self))

    def _wait_for_unshard(self, original: Callable[[Any], None], group: Any) -> None:
        policy = self._policy(group)
        if policy is None or not group._all_gather_result:
            return original(group)
        state: TrainingState = group._training_state
        original(group)
        self.counts.unshards[state.name.lower()] += 1
        if policy.event:
            _order_consumers(group)
        if state in policy.states:
            began = time.perf_counter()
            _wait_for_compute(group)
            self.counts.barriers += 1
            self.counts.seconds += time.perf_counter() - began
        return None

    def _reshard(self, original: Callable[[Any], None], group: Any) -> None:
        policy = self._policy(group)
        if policy is not None and policy.event:
            _hold_free(group)
        original(group)


def install(model: nn.Module, config: SyncConfig, *, name: str = "model") -> UnshardGuard | None:
    """Guard a sharded model; a guard already installed takes it on instead of wrapping twice.

    Args:
        name: what the model is called where its groups are counted.

    Returns:
        The guard, or None for `sync_mode=off`, which touches nothing.

    Raises:
        RuntimeError: torch's version is outside the allowed range, or what the guard needs of it is another.
    """
    if config.mode is SyncMode.off:
        return None
    check_torch(config.mode)
    guard = installed()
    if guard is None:
        guard = UnshardGuard()
        guard._wrap()
    guard.manage(model, config, name=name)
    return guard


@contextmanager
def guarded(
    model: nn.Module, mode: str = "universal", *, states: Sequence[str] | None = None
) -> Iterator[UnshardGuard]:
    """Guard a model of your own, sharded by `fully_shard`, inside the block, and leave torch as it was after it.

    Blocks may lie in one another: each guards its model, and all of them count in the same place.

    Args:
        mode: `universal`: the host waits after every unshard; `selective`: after those in `states`; `event`: the
            device's streams are ordered and the host waits for none.
        states: for `selective` alone, some of forward, pre_backward, post_backward, idle (None: the first two).

    Returns:
        The guard, whose `counts` say what it saw and did.

    Raises:
        ValueError: the mode or a state does not exist, or the model is not sharded.
        RuntimeError: as `install`.
    """
    modes = [choice.name for choice in SyncMode if choice is not SyncMode.off]
    require(mode in modes, "mode", mode, f"one of {', '.join(modes)}", "choose one, or leave the guard out")
    selective = mode == SyncMode.selective.name
    require(states is None or selective, "states", states, f"left out with mode={mode}", "or choose mode=selective")
    config = SyncConfig(SyncMode[mode]) if states is None else SyncConfig(SyncMode[mode], list(states))
    config.validate()
    groups, name = param_groups(model), type(model).__name__
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter groups of FSDP2; call fully_shard before")
    guard = install(model, config, name=name)
    assert guard is not None
    try:
        yield guard
    finally:
        guard.unmanage(groups, policy_of(config), name=name)
        if not guard.num_groups:
            guard.remove()


def installed() -> UnshardGuard | None:
    """Return the guard that is installed at present."""
    method = _fsdp_param_group.FSDPParamGroup.wait_for_unshard
    guard: UnshardGuard | None = getattr(method, "unshard_guard", None)
    return guard


def check_torch(mode: SyncMode, version: str = torch.__version__) -> None:
    """Refuse a torch that is not allowed, or whose parts are not as the guard needs them.

    Raises:
        RuntimeError: naming mode and version, and what is missing or has another signature.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    key, remedy = f"sync_mode={mode.name}", f"use sync_mode=off, or torch {TESTED}, which is tested"
    if not ALLOWED_TORCH[0] <= (major, minor) < ALLOWED_TORCH[1]:
        raise RuntimeError(f"{key}: torch {version} is outside the allowed range; {remedy}")
    check_internals(GUARD, key=key, remedy=remedy)


def policy_of(config: SyncConfig) -> Policy:
    """Return what a configuration asks the guard to do."""
    every = frozenset(TrainingState)
    listed = frozenset(TrainingState[state.upper()] for state in config.states)
    states = {SyncMode.universal: every, SyncMode.selective: listed}.get(config.mode, frozenset())
    return Policy(states, event=config.mode is SyncMode.event)


def param_groups(model: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a model, in the model's order; one that several modules share, once."""
    groups = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # Older torch: one group a state, or none.
            owned = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            groups += [group for group in owned if group is not None]
    return list(dict.fromkeys(groups))


def _bound(wrapper: Callable[..., None], original: Callable[..., Any], guard: UnshardGuard) -> Callable[..., Any]:
    """Return a method that calls the wrapper with the original and the group, and that `installed` recognizes."""

    @functools.wraps(original)
    def method(group: Any) -> None:
        wrapper(original, group)

    method.unshard_guard = guard  # type: ignore[attr-defined]
    return method


def _wait_for_compute(group: Any) -> None:
    """Let the host wait for the stream that the copy-out and its consumers run on (nothing to wait for on CPU)."""
    stream = group.device_handle.current_stream()
    if hasattr(stream, "synchronize"):
        stream.synchronize()
    else:
        group.device_handle.synchronize()


def _order_consumers(group: Any) -> None:
    """Make every other stream that may read the parameters wait for the copy-out that was just enqueued."""
    event = group.device_handle.current_stream().record_event()
    for stream in _consumer_streams(group):
        stream.wait_event(event)


def _hold_free(group: Any) -> None:
    """Let the memory be freed only after what consumers have enqueued so far."""
    current = group.device_handle.current_stream()
    for stream in _consumer_streams(group):
        current.wait_event(stream.record_event())


def _consumer_streams(group: Any) -> list[Any]:
    handle = group.device_handle
    streams = [handle.default_stream()] if hasattr(handle, "default_stream") else []
    streams += [getattr(group.comm_ctx, name) for name in STREAMS if hasattr(group.comm_ctx, name)]
    return [stream for stream in streams if stream != handle.current_stream()]
