"""Place rotations and quantizers in a model: which linear gets which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rotexp.config import QuantConfig, RotationConfig, RotationInit
from rotexp.models.arch import ArchSpec
from rotexp.quant.fake import FakeQuantizer
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.attention import quantize_cache
from rotexp.rotation.bank import Rotation, RotationBank, draw
from rotexp.rotation.hadamard import HadamardTransform
from rotexp.rotation.linear import RotatedEmbedding, RotatedLinear
from rotexp.rotation.mode import Mode
from rotexp.rotation.norms import decoder_layers

BANK = "rotation_bank"
"""The name under which a model registers its bank."""


@dataclass
class RotatedModel:
    """A causal model with rotations and quantizers in place.

    Attributes:
        network: the Hugging Face model; `network(token_ids).logits`.
        bank: its rotations.
        mode: what it computes at the moment.
        placements: for each rotation, where it acts, in words.
        online: order of every transform that stays in the merged model.
    """

    network: nn.Module
    spec: ArchSpec
    bank: RotationBank
    mode: Mode
    placements: dict[str, str]
    online: dict[str, int]

    @property
    def rotated_modules(self) -> list[RotatedLinear | RotatedEmbedding]:
        """Every module that rotates or quantizes, in the model's order."""
        return [module for module in self.network.modules() if isinstance(module, (RotatedLinear, RotatedEmbedding))]

    @property
    def units(self) -> list[nn.Module]:
        """What is sharded as one: the embedding, each decoder layer, the head."""
        embedding, head = (self.network.get_submodule(name) for name in (self.spec.embedding, self.spec.head))
        return [embedding, *decoder_layers(self.network, self.spec), head]

    def logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map token_ids: (batch, tokens) to logits (batch, tokens, vocabulary), as the mode says."""
        logits: torch.Tensor = self.network(token_ids, use_cache=False).logits
        return logits

    def refresh_quantizers(self) -> None:
        """Forget every cached clip ratio; to be called when weights or rotations have moved."""
        for module in self.rotated_modules:
            if isinstance(module, RotatedLinear):
                module.weight_quantizer.refresh()

    @contextmanager
    def reusing_weights(self) -> Iterator[None]:
        """Rotate and quantize each weight once for all forwards of the block; takes the memory of the whole weights.

        Inside the block neither mode, rotations nor weights may change, except that quantization may be switched off.
        """
        linears = [module for module in self.rotated_modules if isinstance(module, RotatedLinear)]
        for linear in linears:
            linear.keep_quantized_weight(True)
        try:
            yield
        finally:
            for linear in linears:
                linear.keep_quantized_weight(False)

    def check_widths(self) -> None:
        """Try every quantizer's group size on the width it will meet.

        Raises:
            ValueError: one does not divide it; both are named.
        """
        for name, module in self.network.named_modules():
            if isinstance(module, RotatedLinear):
                quantizers = {"weights": module.weight_quantizer, "activations": module.input_quantizer}
                for kind, quantizer in quantizers.items():
                    _check_width(f"quant.{kind}", quantizer.spec, module.weight.shape[1], where=name)

    def starts(self, kind: RotationInit, *, seed: int) -> dict[str, torch.Tensor]:
        """Draw a start of the given kind for every rotation."""
        return {
            name: draw(kind.name, matrix.shape[0], name=name, seed=seed).to(matrix.device)
            for name, matrix in self.bank.items()
        }


def place(model: nn.Module, spec: ArchSpec, rotation: RotationConfig, quant: QuantConfig, *, seed: int) -> RotatedModel:
    """Replace the model's embedding, linears and attention by ones that rotate and quantize; weights keep their names.

    Args:
        model: a Hugging Face causal model, untied; may be on the meta device.

    Raises:
        ValueError: a Hadamard matrix is asked for in an order that has none.
    """
    config: Any = model.config
    layers = decoder_layers(model, spec)
    mode, bank, placements = Mode(), RotationBank(), {}

    def own(name: str, order: int, where: str) -> Rotation:
        placements[name] = where
        matrix = draw(rotation.init.name, order, name=name, seed=seed)
        return bank.add(name, nn.Parameter(matrix, requires_grad=rotation.learned))

    residual = own("R1", config.hidden_size, "residual stream") if rotation.r1 is not False else None
    online = HadamardTransform(_input_width(layers[0], spec.down)) if rotation.r4 else None
    factory = _LinearFactory(mode, quant)
    for index, layer in enumerate(layers):
        path = f"{spec.layers}.{index}.{spec.attention}"
        head = own(f"R2_{index}", head_dim(config), f"values and output of {path}") if rotation.r2 is not False else None
        _place_layer(layer, spec, factory, residual=residual, head=head, online=online)
    if residual is not None:
        embedding: Any = model.get_submodule(spec.embedding)
        model.set_submodule(spec.embedding, RotatedEmbedding(embedding, mode=mode, rotation=residual))
        model.set_submodule(spec.head, factory.build(model.get_submodule(spec.head), residual, None, quantized=False))
    if quant.kv.enabled:
        _check_width("quant.kv", quant.kv, head_dim(config), where="keys and values")
        attention = [layer.get_submodule(spec.attention) for layer in layers]
        quantize_cache(model, attention, quantizer=FakeQuantizer(quant.kv), mode=mode)
    model.register_module(BANK, bank)
    return RotatedModel(model, spec, bank, mode, placements, {} if online is None else {"R4": online.order})


def head_dim(config: Any) -> int:
    """Return the width of one attention head of a Hugging Face config."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def _input_width(layer: nn.Module, name: str) -> int:
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear.in_features


def _check_width(key: str, spec: QuantSpec, width: int, *, where: str) -> None:
    try:
        spec.num_groups(width)
    except ValueError as error:
        raise ValueError(f"{key}.{error} (at {where})") from None


@dataclass(frozen=True)
class _LinearFactory:
    """Builds rotated linears that share a mode and quantizer specs."""

    mode: Mode
    quant: QuantConfig

    def build(
        self,
        linear: nn.Module,
        input_rotation: Rotation | None,
        output_rotation: Rotation | None,
        *,
        online: HadamardTransform | None = None,
        quantized: bool = True,
    ) -> RotatedLinear:
        assert isinstance(linear, nn.Linear)
        off = QuantSpec()
        return RotatedLinear(
            linear,
            mode=self.mode,
            weight_quantizer=FakeQuantizer(self.quant.weights if quantized else off),
            input_quantizer=FakeQuantizer(self.quant.activations if quantized else off),
            input_rotation=input_rotation,
            output_rotation=output_rotation,
            online=online,
        )


def _place_layer(
    layer: nn.Module,
    spec: ArchSpec,
    factory: _LinearFactory,
    *,
    residual: Rotation | None,
    head: Rotation | None,
    online: HadamardTransform | None,
) -> None:
    inputs = dict.fromkeys(spec.readers, residual) | {spec.output: head}
    outputs = {spec.value: head} | dict.fromkeys(spec.writers, residual)
    for name in dict.fromkeys((*spec.readers, *spec.writers)):
        rotated = factory.build(
            layer.get_submodule(name),
            inputs.get(name),
            outputs.get(name),
            online=online if name == spec.down else None,
        )
        layer.set_submodule(name, rotated)
