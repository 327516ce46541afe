"""A model with rotations and quantizers in place, as every phase of a run sees it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from rotexp.models.arch import ArchSpec, decoder_layers, embedding_name, head_name
from rotexp.orthogonal.hadamard import is_constructible
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.scales import QuantizerScales
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.bank import Rotation, RotationBank
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.file import assign_rotations, load_rotations
from rotexp.rotation.hooks import RotatedInput, RotatedOutput
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.mode import Mode
from rotexp.rotation.options import RotationConfig, RotationInit
from rotexp.rotation.start import draw_start

SCALES = "quantizer_scales"
"""The name under which a model registers its learned scales."""

Consumer = RotatedLinear | RotatedExperts | RotatedInput | RotatedOutput
"""What uses rotations: it can say what its parameters are with them baked in (`merged`), and let go (`release`)."""


@dataclass(frozen=True)
class Trace:
    """What a float model computed of token_ids: (batch, tokens).

    Attributes:
        logits: (batch, tokens, vocabulary), float32.
        layers: each layer's output (batch, tokens, hidden), of the same dtype.
    """

    token_ids: Tensor
    logits: Tensor
    layers: list[Tensor]


@dataclass
class RotatedModel:
    """A causal model with rotations and quantizers in place.

    Attributes:
        network: the Hugging Face model; `network(token_ids).logits`.
        bank: its rotations.
        mode: what it computes at the moment.
        placements: for each rotation, where it acts, in words.
        online: order of every Hadamard transform that stays in the merged model; it acts on each block of that order.
        warnings: what was left out because this model does not let it exist.
        rms_norms: names of the norms that stop subtracting the mean when they are folded.
        added: parameters that the checkpoint does not have (biases that take up norms' biases); they start at zero.
        untied: the head's weight, if the checkpoint has it as the embedding's and R1 parted it from that.
        hooked: consumers that are no modules, with the names of the modules whose parameters are theirs.
        scales: learned scales of the weight quantizers, if they are trained.
        prepared: whether norms are folded and online transforms baked, without which nothing may be merged.
        merged_residual: R1 as it went into the weights, whose basis the residual stream of the merged model has.
        proof: what the float model computed, once it is proved that the model as it now is computes it, too.
    """

    network: nn.Module
    spec: ArchSpec
    bank: RotationBank
    mode: Mode
    placements: dict[str, str] = field(default_factory=dict)
    online: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    rms_norms: list[str] = field(default_factory=list)
    added: set[str] = field(default_factory=set)
    untied: str | None = None
    hooked: list[RotatedInput | RotatedOutput] = field(default_factory=list)
    scales: QuantizerScales | None = None
    prepared: bool = False
    merged_residual: Tensor | None = None
    proof: Trace | None = None

    @property
    def rotated_modules(self) -> list[RotatedLinear | RotatedExperts]:
        """Every module that rotates and quantizes weights, in the model's order."""
        return [module for module in self.network.modules() if isinstance(module, (RotatedLinear, RotatedExperts))]

    def consumers(self, unit: nn.Module) -> list[tuple[nn.Module, Consumer]]:
        """Return everything inside a unit that uses rotations, with the module that has its parameters."""
        inside = set(unit.modules())
        modules = [(module, module) for module in self.rotated_modules if module in inside]
        return [*modules, *((hook.module, hook) for hook in self.hooked if hook.module in inside)]

    @property
    def units(self) -> list[nn.Module]:
        """What is sharded as one: embeddings, each decoder layer, the head."""
        embeddings = [name for name in (embedding_name(self.network), self.spec.positions) if name]
        names = [*embeddings, head_name(self.network)]
        *first, head = (self.network.get_submodule(name) for name in names)
        return [*first, *decoder_layers(self.network, self.spec), head]

    @property
    def trained_names(self) -> list[str]:
        """Names of every parameter that is trained and no rotation, in the network's order."""
        rotations = set(self.bank.parameters())
        named = self.network.named_parameters()
        return [name for name, parameter in named if parameter.requires_grad and parameter not in rotations]

    @property
    def unsharded(self) -> set[nn.Parameter]:
        """What stays whole on every rank and outside FSDP, which hence does not reduce its gradients.

        A set has another order on every rank: take the order of collectives from the network's parameters.
        """
        return set(self.bank.parameters()) | set(self.scales.parameters() if self.scales is not None else ())

    @property
    def residual(self) -> Rotation | None:
        """The rotation of the residual stream, if there is one."""
        return Rotation(self.bank, "R1") if "R1" in self.bank else None

    @property
    def turned_residual(self) -> Rotation | None:
        """What the residual stream is rotated by as the mode now says; None where it is in the basis of its weights."""
        return self.residual if self.mode.turns(self.residual) else None

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token_ids: (batch, tokens) to logits (batch, tokens, vocabulary), as the mode says."""
        logits: torch.Tensor = self.network(token_ids, use_cache=False).logits
        return logits

    def keep_codes(self, keep: bool) -> None:
        """Say whether quantized weights are kept from forward to backward, as codes of a byte a weight.

        Sharding that frees a layer's weights in between would be undone by it.
        """
        for module in self.rotated_modules:
            if isinstance(module, RotatedLinear):
                module.keep_codes = keep

    def refresh_quantizers(self) -> None:
        """Forget every cached clip ratio; to be called when weights or rotations have moved."""
        for module in self.rotated_modules:
            module.refresh()

    @contextmanager
    def fresh_quantizers(self) -> Iterator[None]:
        """Search clip ratios anew inside the block, and use after it, bit for bit, those that were in use before.

        Where none were, those after it are searched once more. Quantized weights must not stay gathered beyond it.
        """
        held = [(quantizer, quantizer.clip_ratios) for quantizer in self._searching_quantizers()]
        self.refresh_quantizers()
        try:
            yield
        finally:
            self.refresh_quantizers()  # codes too, which were made by the ratios of the block
            for quantizer, ratios in held:
                quantizer.clip_ratios = ratios

    def _searching_quantizers(self) -> Iterator[FakeQuantizer]:
        for module in self.rotated_modules:
            yield from module.searching_quantizers

    @contextmanager
    def reusing_weights(self) -> Iterator[None]:
        """Rotate and quantize each weight once for all forwards of the block; takes the memory of the whole weights.

        Inside the block neither mode, rotations nor weights may change, except that quantization may be switched off.
        """
        for module in self.rotated_modules:
            module.keep_quantized_weight(True)
        try:
            yield
        finally:
            for module in self.rotated_modules:
                module.keep_quantized_weight(False)

    def check_widths(self) -> None:
        """Try every quantizer's group size on the width it will meet.

        Raises:
            ValueError: one does not divide it; both are named.
        """
        for name, module in self.network.named_modules():
            if isinstance(module, (RotatedLinear, RotatedExperts)):
                for kind, spec, width in module.quantized_widths():
                    check_width(f"quant.{kind}", spec, width, where=name)

    def orders_without_hadamard(self) -> list[int]:
        """Return the orders of rotations that no Hadamard matrix has."""
        return sorted({matrix.shape[-1] for _, matrix in self.bank.items() if not is_constructible(matrix.shape[-1])})

    def starts(self, kind: RotationInit, *, seed: int) -> dict[str, torch.Tensor]:
        """Draw a start of the given kind for every rotation."""
        return {
            name: draw_start(kind.name, matrix.shape, name=name, seed=seed).to(matrix.device)
            for name, matrix in self.bank.items()
        }


def start_from_file(model: RotatedModel, rotation: RotationConfig, *, identity: str) -> dict[str, float]:
    """Let the bank hold the rotations of the file `rotation.path`, if one is named.

    Args:
        identity: what the model is called in files.

    Returns:
        The rotations that were not quite orthogonal and were replaced by the nearest that are, with max|R Rᵀ − I|.

    Raises:
        ValueError: the file cannot be read, or does not fit the model.
    """
    if rotation.path is None:
        return {}
    loaded = load_rotations(Path(rotation.path))
    return assign_rotations(model.bank, loaded, model=identity, placements=model.placements, online=model.online)


def check_width(key: str, spec: QuantSpec, width: int, *, where: str) -> None:
    """Raise ValueError, naming the key and the place, when a group size does not divide a width."""
    try:
        spec.num_groups(width)
    except ValueError as error:
        raise ValueError(f"{key}.{error} (at {where})") from None
