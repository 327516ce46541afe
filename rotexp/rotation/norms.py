"""Fold norms into what reads them, so that what lies between two of them commutes with a rotation.

Which kind a norm is, is found by running it, so that neither its class nor its family has to be trusted. A norm that
subtracts the mean (LayerNorm) becomes one that does not (RMSNorm): everything that writes to the residual stream is
centred instead, once (Ashkboos et al., "SliceGPT", ICLR 2024, section 3.2).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotexp.models.arch import ArchSpec, decoder_layers, embedding_name, head_name, model_type, present
from rotexp.sharding.local_rows import local_rows, reshard, row_slice, whole

PROBE_TOLERANCE = 1e-4
"""Largest relative difference of a norm from the formula it is taken for (float32, eps neglected)."""

HOST: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
"""Where norms are probed, whatever the caller's defaults are."""


@dataclass(frozen=True)
class NormKind:
    """What a norm computes of x: `x / rms(x) * (gain_offset + weight) + bias`, the mean of x subtracted first or not.

    Attributes:
        centred: whether the mean is subtracted.
        gain_offset: 0, or 1 where the stored weight is the gain's difference from one; None without a weight.
        biased: whether it has a bias.
        eps: what is added to the mean square.
    """

    centred: bool
    gain_offset: float | None
    biased: bool
    eps: float


@torch.no_grad()
def probe_norm(norm: nn.Module, width: int, *, name: str) -> NormKind:
    """Find a norm's kind by running a copy with random parameters on the host.

    Args:
        norm: maps (..., width) to (..., width); may be on the meta device or sharded.

    Raises:
        ValueError: it is no norm of a kind that can be folded.
    """
    copied = _random_copy(norm, width)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, width, generator=generator, **HOST) * 100 + 50
    found = copied(x)
    weight, bias = copied._parameters.get("weight"), copied._parameters.get("bias")
    offsets = (None,) if weight is None else (0.0, 1.0)
    for centred, offset in product((False, True), offsets):
        gain = 1.0 if weight is None or offset is None else offset + weight
        expected = _normalize(x, centred=centred, eps=0.0) * gain + (0.0 if bias is None else bias)
        if (found - expected).abs().max() <= PROBE_TOLERANCE * expected.abs().max():
            if weight is not None and offset is not None:
                weight.fill_(1.0 - offset)  # a gain of one, so that eps shows alone
            return NormKind(centred, offset, bias is not None, _probe_eps(copied, x, centred=centred))
    raise ValueError(
        f"{name}: {type(norm).__name__} is neither RMSNorm nor LayerNorm, with gain w or 1 + w, so R1 cannot pass it"
    )


def _random_copy(norm: nn.Module, width: int) -> nn.Module:
    """Return the norm with fresh random parameters, on the host in float32."""
    generator = torch.Generator().manual_seed(1)
    bare = copy.copy(norm)
    bare._parameters = {
        name: parameter if parameter is None else nn.Parameter(torch.rand(width, generator=generator, **HOST) + 0.5)
        for name, parameter in norm._parameters.items()
    }
    return bare


def _normalize(x: Tensor, *, centred: bool, eps: float) -> Tensor:
    centre = x - x.mean(-1, keepdim=True) if centred else x
    return centre * torch.rsqrt(centre.square().mean(-1, keepdim=True) + eps)


def _probe_eps(norm: nn.Module, x: Tensor, *, centred: bool) -> float:
    """Return the eps of a norm whose gain is one: as declared, or from what it makes of tiny inputs (three digits)."""
    declared = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    if isinstance(declared, float):
        return declared
    small = x * 1e-8
    centre = small - small.mean(-1, keepdim=True) if centred else small
    ratio = (norm(2 * small) - norm(small)).square().mean().sqrt() / centre.square().mean().sqrt()
    return float(f"{float(ratio) ** -2:.2e}")


@dataclass(frozen=True)
class _RootMeanSquare:
    """What a folded norm computes; takes the place of its `forward`.

    Attributes:
        trained: the norm if it is trained on, so that its parameters act, which begin as no gain and no bias; or None.
    """

    kind: NormKind
    trained: nn.Module | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x: (..., width), in float32 (float64 for a float64 tensor), returned in its dtype."""
        values = F.rms_norm(_wide(x), x.shape[-1:], eps=self.kind.eps)
        own = self.trained._parameters if self.trained is not None else {}
        weight, bias = own.get("weight"), own.get("bias")
        if weight is not None and self.kind.gain_offset is not None:
            values = values * (self.kind.gain_offset + weight)
        return (values if bias is None else values + bias).to(x.dtype)


@dataclass(frozen=True)
class NormReaders:
    """A norm and the modules that read its output; experts among them read by their `gate_up_proj`."""

    name: str
    norm: nn.Module
    readers: list[nn.Module]

    def weights(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return each reader's weight, (outputs, width) or (experts, outputs, width), and bias if it has one."""
        owned = [reader._parameters for reader in self.readers]
        pairs: list[Any] = [(own.get("gate_up_proj", own.get("weight")), own.get("bias")) for own in owned]
        return pairs


def norm_readers(model: nn.Module, spec: ArchSpec) -> list[NormReaders]:
    """Return every norm before a reader, in the model's order."""
    found = []
    for index, layer in enumerate(decoder_layers(model, spec)):
        for norm in present(layer, spec.norms):
            readers = [layer.get_submodule(name) for name in present(layer, spec.norms[norm])]
            found.append(NormReaders(f"{spec.layers}.{index}.{norm}", layer.get_submodule(norm), readers))
    if spec.final_norm is not None:
        head = model.get_submodule(head_name(model))
        found.append(NormReaders(spec.final_norm, model.get_submodule(spec.final_norm), [head]))
    return found


def trains_norms(model: nn.Module, spec: ArchSpec) -> bool:
    """Return whether a norm before a reader has parameters that require gradients."""
    groups = norm_readers(model, spec)
    return any(parameter.requires_grad for group in groups for parameter in group.norm.parameters(recurse=False))


def norm_kinds(model: nn.Module, spec: ArchSpec) -> dict[str, NormKind]:
    """Return the kind of each norm before a reader, by name.

    Raises:
        ValueError: a norm is of no kind that can be folded, or some subtract the mean and some do not; the model's type
            is named.
    """
    width = model.get_parameter(f"{embedding_name(model)}.weight").shape[1]
    try:
        kinds = {group.name: probe_norm(group.norm, width, name=group.name) for group in norm_readers(model, spec)}
    except ValueError as error:
        raise ValueError(f"model_type={model_type(model)}: {error}") from None
    if len({kind.centred for kind in kinds.values()}) > 1:
        reason = "some of the norms subtract the mean and some do not, so R1 cannot pass them"
        raise ValueError(f"model_type={model_type(model)}: {reason}")
    return kinds


@torch.no_grad()
def last_gain(model: nn.Module, spec: ArchSpec) -> tuple[Tensor | None, Tensor | None]:
    """Return the gain and the bias of the norm before the head, (hidden,), whole and apart from their parameters.

    Either is None where the norm has none, or where there is no norm.

    Raises:
        ValueError: it is of no kind that can be folded.
    """
    if spec.final_norm is None:
        return None, None
    norm = model.get_submodule(spec.final_norm)
    width = model.get_parameter(f"{embedding_name(model)}.weight").shape[1]
    offset = probe_norm(norm, width, name=spec.final_norm).gain_offset
    weight, shift = norm._parameters.get("weight"), norm._parameters.get("bias")
    gain = None if weight is None or offset is None else _wide(whole(weight)) + offset
    return gain, None if shift is None else _wide(whole(shift)).clone()


@torch.no_grad()
def fold_norms(model: nn.Module, spec: ArchSpec) -> None:
    """Fold every norm's gain and bias into its readers, and centre the writers if the norms subtract means.

    Gains are one and biases zero then, and may be trained on from there.

    Works on any shard of rows; what is not local is gathered, one parameter at a time. Products are formed in float32
    (float64 for a float64 model) and stored in the weight's dtype.

    Raises:
        ValueError: a norm is of no kind that can be folded, or kinds are mixed.
    """
    reshard(model)
    groups, kinds = norm_readers(model, spec), norm_kinds(model, spec)
    for group in groups:
        _fold(group, kinds[group.name])
    if kinds[groups[0].name].centred:
        _centre_writers(model, spec)


def _fold(group: NormReaders, kind: NormKind) -> None:
    weight, shift = group.norm._parameters.get("weight"), group.norm._parameters.get("bias")
    if shift is not None:
        _fold_shift(group, _wide(whole(shift)))
        local_rows(shift).fill_(0.0)
    if weight is not None and kind.gain_offset is not None:
        gain = _wide(whole(weight)) + kind.gain_offset
        for reader, _ in group.weights():
            rows = local_rows(reader)
            rows.copy_(_wide(rows) * gain)
        local_rows(weight).fill_(1.0 - kind.gain_offset)
    if kind.centred:
        trained = any(parameter.requires_grad for parameter in group.norm.parameters(recurse=False))
        group.norm.forward = _RootMeanSquare(kind, group.norm if trained else None)


def _fold_shift(group: NormReaders, shift: Tensor) -> None:
    """Add to each reader's bias what it makes of the norm's bias."""
    for weight, bias in group.weights():
        assert bias is not None, f"{group.name} has a bias, so its readers were given one when they were placed"
        added = _wide(whole(weight)) @ shift
        rows = local_rows(bias)
        rows.copy_(_wide(rows) + added[row_slice(bias)])


def _centre_writers(model: nn.Module, spec: ArchSpec) -> None:
    """Subtract from everything that is added to the residual stream its mean over the stream's width."""
    for name in (embedding_name(model), spec.positions):
        if name is not None:
            rows = local_rows(model.get_parameter(f"{name}.weight"))
            rows.copy_(_wide(rows) - _wide(rows).mean(-1, keepdim=True))
    for layer in decoder_layers(model, spec):
        for name in present(layer, spec.writers):
            for parameter in layer.get_submodule(name).parameters(recurse=False):
                rows = local_rows(parameter)
                rows.copy_(_wide(rows) - _wide(whole(parameter)).mean(0))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
