"""The private parts of FSDP2 that rotexp wraps, calls and reads, and whether this torch has them as it needs them."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ParamModuleInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

ALLOWED_TORCH = ((2, 11), (2, 14))
"""Versions that `pyproject.toml` allows, from the first up to, without, the second.

Everything here was tested with 2.13 alone; the others are refused where the parts below are not as they are needed.
"""

TESTED = "2.13"
"""The version that is recommended in place of another."""

STREAMS = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream")
"""The streams of FSDP2 that may read gathered parameters."""


@dataclass(frozen=True)
class Internals:
    """What is needed of one of torch's classes.

    Attributes:
        wrapped: methods that others take the place of, so that each has to take its object and nothing else.
        called: methods that are called without arguments.
        fields: attributes of its objects that are read or written.
    """

    owner: type
    wrapped: tuple[str, ...] = ()
    called: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """Say what this torch lacks, or has otherwise."""
        found = _attributes(self.owner)
        missing = [name for name in (*self.wrapped, *self.called, *self.fields) if name not in found]
        methods = [(name, name in self.wrapped) for name in (*self.wrapped, *self.called) if name not in missing]
        changed = [fault for name, wrapped in methods if (fault := self._changed(name, wrapped=wrapped))]
        return [f"has no {self.owner.__name__}.{name}" for name in missing] + changed

    def _changed(self, name: str, *, wrapped: bool) -> str:
        """Say how a method's signature differs from what is needed; empty if it does not."""
        signature = inspect.signature(getattr(self.owner, name))
        needed = [parameter for parameter in signature.parameters.values() if wrapped or not _is_optional(parameter)]
        parameters = ", ".join(map(str, signature.parameters.values()))
        return "" if len(needed) == 1 else f"has {self.owner.__name__}.{name}({parameters}), not {name}(self)"


GROUPS = (Internals(FSDPModule, called=("_get_fsdp_state",)), Internals(FSDPState, fields=("_fsdp_param_group",)))
"""What finds the parameter groups of a model."""

GUARD = (
    *GROUPS,
    Internals(
        FSDPParamGroup,
        wrapped=("wait_for_unshard", "reshard"),
        fields=("_all_gather_result", "_training_state", "device_handle", "comm_ctx"),
    ),
    Internals(FSDPCommContext, fields=STREAMS),
)
"""What the unshard guard stands on."""

DIVISION = (
    *GROUPS,
    Internals(FSDPParamGroup, called=("_init_mp_dtypes",), fields=("fsdp_params",)),
    Internals(
        FSDPParam,
        called=("_init_extensions",),
        fields=("_module_info", "_unsharded_param", "all_gather_outputs", "mp_policy", "param_dtype", "sharded_param"),
    ),
    Internals(ParamModuleInfo, fields=("module", "param_name")),
)
"""What sharded weights stand on whose rotating and quantizing ranks share."""


def check_internals(needs: Iterable[Internals], *, key: str, remedy: str) -> None:
    """Compare what is needed with the torch that is installed.

    Args:
        key: the configuration's key and value that need it.
        remedy: what to do.

    Raises:
        RuntimeError: something is missing, or a method takes other arguments; the first fault is named.
    """
    if faults := [fault for need in needs for fault in need.faults()]:
        raise RuntimeError(f"{key}: torch {torch.__version__} {faults[0]}; {remedy}")


def _is_optional(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return variadic or parameter.default is not inspect.Parameter.empty


def _attributes(owner: type) -> set[str]:
    """Return what a class has and what its methods give its objects, since no object is there to be asked yet."""
    functions = [function for base in owner.__mro__ for function in vars(base).values()]
    stored = {
        str(instruction.argval)
        for function in functions
        if isinstance(function, FunctionType)
        for instruction in dis.get_instructions(function)
        if instruction.opname == "STORE_ATTR"
    }
    declared = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    return {*dir(owner), *declared, *stored}
