"""Place rotations and quantizers in a model: which module gets which."""

from __future__ import annotations

from typing import Any

from torch import nn

from rotexp.models.arch import (
    ArchSpec,
    decoder_layers,
    down_widths,
    embedding_name,
    head_dim,
    head_name,
    is_tied,
    model_type,
    present,
    r1_obstacle,
    untie,
)
from rotexp.models.sharing import shared_parameters
from rotexp.orthogonal.hadamard import HadamardTransform, hadamard_obstacle, largest_block
from rotexp.quant.options import Products, QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.attention import Cache, cache_obstacle, place_cache
from rotexp.rotation.bank import Rotation, RotationBank
from rotexp.rotation.experts import RotatedExperts
from rotexp.rotation.hooks import RotatedInput, RotatedOutput
from rotexp.rotation.linear import RotatedLinear
from rotexp.rotation.mode import UNPREPARED, Mode
from rotexp.rotation.model import RotatedModel, check_width
from rotexp.rotation.norms import norm_kinds, norm_readers
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.quantizers import fake_quantizer
from rotexp.rotation.shared_input import SharedInput
from rotexp.rotation.start import drawing
from rotexp.rotation.trial import Trial

BANK = "rotation_bank"
"""The name under which a model registers its bank."""


def place(model: nn.Module, spec: ArchSpec, rotation: RotationConfig, quant: QuantConfig, *, seed: int) -> RotatedModel:
    """Replace or hook the model's embeddings, linears, experts and attention; weights keep their names.

    Args:
        model: a Hugging Face causal model; may be on the meta device. A tied head gets a weight of its own where R1
            acts, since the final norm's gain goes into it, and stays tied elsewhere.

    Raises:
        ValueError: a rotation that was asked for cannot exist in this model, a Hadamard matrix has no such order, a
            module that would have to be rotated is of an unknown class, or parameters other than head and embedding
            share their memory where a rotation goes into weights.
    """
    _require_own_weights(model, rotation)
    any_wanted = (rotation.r1, rotation.r2, rotation.r3, rotation.r4) != (False,) * 4
    trial = Trial(model, spec, _place_untried) if any_wanted else None
    return _place(model, spec, rotation, quant, seed=seed, trial=trial)


def _require_own_weights(model: nn.Module, rotation: RotationConfig) -> None:
    """Refuse weights that two modules share, into which two rotations or gains would go (R3 goes into none)."""
    if (rotation.r1, rotation.r2, rotation.r4) == (False, False, False):
        return
    tied = {f"{embedding_name(model)}.weight", f"{head_name(model)}.weight"}
    for one, other in shared_parameters(model):
        if {one, other} != tied:
            raise ValueError(
                f"model_type={model_type(model)}: {one} and {other} share their memory, so a rotation or gain in one "
                f"would change the other; give each a weight of its own, or set rotation=none"
            )


def _place_untried(model: nn.Module, spec: ArchSpec, rotation: RotationConfig) -> RotatedModel:
    return _place(model, spec, rotation, QuantConfig(), seed=0, trial=None)


def _place(
    model: nn.Module, spec: ArchSpec, rotation: RotationConfig, quant: QuantConfig, *, seed: int, trial: Trial | None
) -> RotatedModel:
    placed = RotatedModel(model, spec, RotationBank(), Mode(refusal=UNPREPARED))
    _Placer(placed, rotation, quant, seed=seed, trial=trial).run()
    model.register_module(BANK, placed.bank)
    return placed


class _Placer:
    """Carries out one placement."""

    def __init__(
        self,
        placed: RotatedModel,
        rotation: RotationConfig,
        quant: QuantConfig,
        *,
        seed: int,
        trial: Trial | None,
    ) -> None:
        self.placed = placed
        self.model = placed.network
        self.spec = placed.spec
        self.config: Any = self.model.config
        self.rotation = rotation
        self.quant = quant
        self.draw = drawing(rotation, seed=seed)
        self.trial = trial
        self.value_rows = self.spec.value_rows(self.config)

    def run(self) -> None:
        """Place everything."""
        residual = self._residual()
        layers = decoder_layers(self.model, self.spec)
        for index, layer in enumerate(layers):
            self._place_layer(layer, self._head(index), residual=residual)
        self._place_ends(residual)
        self._place_cache(layers)
        self.placed.mode.within = self._within()

    def _own(self, name: str, shape: tuple[int, ...], where: str) -> Rotation:
        """Give the bank a rotation of that shape."""
        self.placed.placements[name] = where
        try:
            matrix = self.draw(name, shape)
        except ValueError as error:
            if self.rotation.start is not None:
                raise
            refusal = f"rotation.init={self.rotation.init.name}: {name} cannot start so: {error}"
            block = self._fitting_block() if name == "R1" else ""
            remedies = f"set rotation.init=random or rotation.{name[:2].lower()}=false{block}"
            raise ValueError(f"{refusal}; {remedies}") from None
        return self.placed.bank.add(name, nn.Parameter(matrix, requires_grad=self.rotation.learned))

    def _found(self, key: str) -> str | None:
        """Return what stands in the way of a rotation on a miniature of the model; note where there is none to try."""
        if self.trial is None:
            return None
        found = self.trial.find(key, block_size=self.rotation.block_size if key == "r4" else None)
        if found.untried is not None:
            self._warn(f"whether {key.upper()} changes the model was not tried beforehand: {found.untried}")
        return found.obstacle

    def _warn(self, warning: str) -> None:
        if warning not in self.placed.warnings:
            self.placed.warnings.append(warning)

    def _wanted(self, key: str, obstacle: str | None) -> bool:
        """Return whether to place a rotation that was not switched off; note the obstacle if that is why not.

        Raises:
            ValueError: it was asked for, and cannot exist.
        """
        if obstacle is None:
            return True
        if getattr(self.rotation, key):
            remedy = "" if "; set " in obstacle else f"; set rotation.{key}=false"
            raise ValueError(f"rotation.{key}=true: cannot act: {obstacle}{remedy}")
        self._warn(f"{key.upper()} is left out: {obstacle}")
        return False

    def _residual(self) -> Rotation | None:
        if self.rotation.r1 is False:
            return None
        hidden, size = self.config.hidden_size, self.rotation.block_size
        obstacle = r1_obstacle(self.model, self.spec) or self._norm_obstacle() or self._found("r1")
        if not self._wanted("r1", obstacle):
            return None
        if is_tied(self.model):
            untie(self.model)
            self.placed.untied = f"{head_name(self.model)}.weight"
        self._add_biases()
        if size is None or size == hidden:
            return self._own("R1", (hidden, hidden), "residual stream")
        _check_block(size, hidden, where="the residual stream")
        return self._own("R1", (hidden // size, size, size), f"residual stream, blocks of {size}")

    def _norm_obstacle(self) -> str | None:
        """Return why some norm of the model lets no rotation pass; note which would run without subtracting means."""
        try:
            kinds = norm_kinds(self.model, self.spec)
        except ValueError as error:
            return str(error)
        self.placed.rms_norms = [name for name, kind in kinds.items() if kind.centred]
        return None

    def _add_biases(self) -> None:
        """Give readers of biased norms the bias into which the norm's is folded."""
        names = {module: name for name, module in self.model.named_modules()}
        for group in norm_readers(self.model, self.spec):
            if group.norm._parameters.get("bias") is None:
                continue
            for reader in group.readers:
                if isinstance(reader, nn.Linear) and reader._parameters["bias"] is None:
                    zeros = reader.weight.new_zeros(reader.out_features)
                    reader.bias = nn.Parameter(zeros, requires_grad=False)
                    self.placed.added.add(f"{names[reader]}.bias")

    def _head(self, index: int) -> Rotation | None:
        if self.rotation.r2 is False or not self._wanted("r2", self._found("r2")):
            return None
        width = head_dim(self.config)
        where = f"values and output of {self.spec.layers}.{index}.{self.spec.attention}"
        return self._own(f"R2_{index}", (width, width), where)

    def _place_layer(self, layer: nn.Module, head: Rotation | None, *, residual: Rotation | None) -> None:
        spec = self.spec
        inputs = dict.fromkeys(spec.readers, residual) | {spec.output: head}
        outputs = {spec.value: head} | dict.fromkeys(spec.writers, residual)
        shared = {name: group for names in spec.norms.values() for group in [SharedInput()] for name in names}
        for name in present(layer, (*spec.readers, *spec.writers)):
            module = layer.get_submodule(name)
            if name in spec.routers and not isinstance(module, nn.Linear):
                self._hook_router(module, residual)
                continue
            rotated = self._linear(
                module,
                inputs.get(name),
                outputs.get(name),
                self.value_rows if name == spec.value else None,
                online=self._online(module.get_parameter("weight").shape[1]) if name in spec.down else None,
                shared=None if name in spec.routers else shared.get(name),
                quantized=name not in spec.routers,
            )
            layer.set_submodule(name, rotated)
        for name in present(layer, [spec.experts] if spec.experts else []):
            layer.set_submodule(name, self._experts(layer.get_submodule(name), residual))

    def _linear(
        self,
        linear: nn.Module,
        input_rotation: Rotation | None,
        output_rotation: Rotation | None,
        output_rows: Any = None,
        *,
        online: HadamardTransform | None = None,
        shared: SharedInput | None = None,
        quantized: bool = True,
    ) -> RotatedLinear:
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"model_type={self.config.model_type}: a {type(linear).__name__} stands where a Linear is needed; "
                "this model is not supported"
            )
        off = QuantSpec()
        return RotatedLinear(
            linear,
            mode=self.placed.mode,
            weight_quantizer=fake_quantizer(self.quant.weights if quantized else off, key="quant.weights"),
            input_quantizer=fake_quantizer(self.quant.activations if quantized else off, key="quant.activations"),
            input_rotation=input_rotation,
            output_rotation=output_rotation,
            output_rows=output_rows,
            online=online,
            shared=shared,
            integer_products=self.quant.products is Products.auto,
        )

    def _experts(self, experts: Any, residual: Rotation | None) -> RotatedExperts:
        return RotatedExperts(
            experts,
            mode=self.placed.mode,
            weights=self.quant.weights,
            activations=self.quant.activations,
            residual=residual,
            online=self._online(experts.down_proj.shape[-1]),
        )

    def _hook_router(self, router: nn.Module, residual: Rotation | None) -> None:
        if residual is not None:
            self.placed.hooked.append(RotatedInput(router, mode=self.placed.mode, rotation=residual))

    def _online(self, width: int) -> HadamardTransform | None:
        """Return R4 for a down projection of that input width, and note its order."""
        if self.rotation.r4 is False:
            return None
        size = self.rotation.block_size or width
        _check_block(size, width, where="the down projection's input")
        obstacle = hadamard_obstacle(size)
        if obstacle:
            obstacle += f"; set rotation.r4=false{self._fitting_block()}"
        if not self._wanted("r4", obstacle or self._found("r4")):
            return None
        self.placed.online["R4" if self.placed.online.get("R4", size) == size else f"R4_{size}"] = size
        return HadamardTransform(size, blocks=width // size)

    def _fitting_block(self) -> str:
        """Return one more remedy for R1 and R4: the largest block that divides the widths of both."""
        size = largest_block(self.config.hidden_size, *down_widths(self.model, self.spec))
        return f" or rotation.block_size={size} (the largest that R1 and R4 can both have)" if size else ""

    def _place_ends(self, residual: Rotation | None) -> None:
        """Rotate embeddings and head."""
        if residual is None:
            return
        for name in (embedding_name(self.model), self.spec.positions):
            if name is not None:
                module = self.model.get_submodule(name)
                self.placed.hooked.append(RotatedOutput(module, mode=self.placed.mode, rotation=residual))
        name = head_name(self.model)
        self.model.set_submodule(name, self._linear(self.model.get_submodule(name), residual, None, quantized=False))

    def _within(self) -> frozenset[str]:
        """Return which rotations nothing needs but the quantizers of the inputs that they turn: R2 not for values."""
        if self.quant.weights.enabled or not self.quant.activations.enabled:
            return frozenset()
        return frozenset(name for name, _ in self.placed.bank.items() if name == "R1" or not self.quant.kv.enabled)

    def _place_cache(self, layers: list[nn.Module]) -> None:
        """Put R3 and the quantization of keys and values into the attention."""
        width, obstacle = head_dim(self.config), cache_obstacle(self.model)
        rotation = None
        no_rotation = obstacle or hadamard_obstacle(width)
        if self.rotation.r3 is not False and self._wanted("r3", no_rotation or self._found("r3")):
            rotation = HadamardTransform(width)
        if self.quant.kv.enabled and obstacle:
            raise ValueError(f"quant.kv.{self.quant.kv.setting}: cannot act: {obstacle}; choose a quant without kv")
        if rotation is not None:
            self.placed.online["R3"] = rotation.order
        if rotation is not None or self.quant.kv.enabled:
            check_width("quant.kv", self.quant.kv, width, where="keys and values")
            cache = Cache(fake_quantizer(self.quant.kv, key="quant.kv"), mode=self.placed.mode, rotation=rotation)
            place_cache(self.model, [layer.get_submodule(self.spec.attention) for layer in layers], cache)


def _check_block(size: int, width: int, *, where: str) -> None:
    if width % size:
        raise ValueError(f"rotation.block_size={size}: must divide {width}, the width of {where}; choose a divisor")
