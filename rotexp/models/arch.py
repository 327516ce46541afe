"""What rotexp has to know of a model family: which modules read and write the residual stream.

A family is data, an `ArchSpec`; every module name below is relative to a decoder layer unless it says otherwise. One
spec serves every model with that structure, dense or not: names that a layer does not have are passed over, and
`check_coverage` makes sure that every parameter a layer has is named by something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from rotexp.models.hf_config import require_equal_layers
from rotexp.models.sharing import share_memory


@dataclass(frozen=True)
class ValueRows:
    """Which outputs of a fused linear are values: in each of `num_blocks` equal blocks those from `start` to `stop`."""

    num_blocks: int
    start: int
    stop: int


@dataclass(frozen=True)
class ArchSpec:
    """One decoder-only structure.

    Attributes:
        model_types: the `model_type` values of Hugging Face configs it covers.
        layers, final_norm: names from the model's root.
        norms: each norm between the residual stream and what reads it, with its readers (its gain is folded into them);
            "" where they read the stream itself.
        attention: the module that computes attention.
        value, output: the linears around the attention product; R2 acts between them.
        writers: the linears that write to the residual stream.
        down: the MLPs' last linears; R4 acts at their inputs.
        value_rows: from a config, which outputs of `value` are values, if it computes queries and keys too.
        post_norms: norms with a gain between a writer and the residual stream; R1 cannot pass them.
        positions: learned positions that are added to the embeddings, from the model's root.
        projections: pattern of what maps embeddings of another width to the residual stream and back, from the root.
        routers: readers that are never quantized: they choose experts.
        experts: a module of three-dimensional weights `gate_up_proj` and `down_proj`, a row an expert.
        internal: patterns of parameters inside a layer that the residual stream does not touch.
        obstacles: attributes of a config, each with the value with which R1 cannot act, and why.
    """

    model_types: tuple[str, ...]
    layers: str
    final_norm: str | None
    norms: dict[str, tuple[str, ...]]
    attention: str
    value: str
    output: str
    writers: tuple[str, ...]
    down: tuple[str, ...]
    value_rows: Callable[[Any], ValueRows | None] = field(default=lambda _config: None)
    post_norms: tuple[str, ...] = ()
    positions: str | None = None
    projections: str = ""
    routers: tuple[str, ...] = ()
    experts: str | None = None
    internal: tuple[str, ...] = ()
    obstacles: tuple[tuple[str, object, str], ...] = ()

    @property
    def readers(self) -> tuple[str, ...]:
        """The modules of a layer that read the residual stream, the experts left out."""
        return tuple(name for names in self.norms.values() for name in names if name != self.experts)


_GATED_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj")
_SHARED_EXPERT = ("mlp.shared_expert_gate", "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _fused_values(config: Any) -> ValueRows:
    """Return where the values lie behind all queries and all keys."""
    keys = config.num_key_value_heads * head_dim(config)
    first = config.num_attention_heads * head_dim(config) + keys
    return ValueRows(1, first, first + keys)


def _interleaved_values(config: Any) -> ValueRows:
    """Return where the values lie behind query and key of each head."""
    return ValueRows(config.num_attention_heads, 2 * head_dim(config), 3 * head_dim(config))


def head_dim(config: Any) -> int:
    """Return the width of one attention head of a Hugging Face config."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


LLAMA = ArchSpec(
    model_types=(
        "llama",
        "mistral",
        "ministral",
        "qwen2",
        "qwen3",
        "gemma",
        "granite",
        "smollm3",
        "glm",
        "stablelm",
        "nemotron",
        "olmo",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
    ),
    layers="model.layers",
    final_norm="model.norm",
    norms={
        "input_layernorm": _QKV,
        "post_attention_layernorm": (*_GATED_MLP, "mlp.gate", *_SHARED_EXPERT, "mlp.experts"),
    },
    attention="self_attn",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    writers=("self_attn.o_proj", "mlp.down_proj", "mlp.shared_expert.down_proj"),
    down=("mlp.down_proj", "mlp.shared_expert.down_proj"),
    routers=("mlp.gate", "mlp.shared_expert_gate"),
    experts="mlp.experts",
    internal=("self_attn.q_norm.*", "self_attn.k_norm.*", "self_attn.q_layernorm.*", "self_attn.k_layernorm.*"),
)

PHI3 = replace(
    LLAMA,
    model_types=("phi3",),
    norms={**LLAMA.norms, "input_layernorm": ("self_attn.qkv_proj",)},
    value="self_attn.qkv_proj",
    value_rows=_fused_values,
)

GLM4 = replace(
    LLAMA,
    model_types=("glm4",),
    post_norms=("post_self_attn_layernorm", "post_mlp_layernorm"),
)

GEMMA2 = replace(
    LLAMA,
    model_types=("gemma2", "gemma3_text"),
    norms={"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATED_MLP},
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)

OLMO2 = replace(
    LLAMA,
    model_types=("olmo2", "olmo3"),
    norms={"": (*_QKV, *_GATED_MLP)},
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)

COHERE = replace(
    LLAMA,
    model_types=("cohere", "cohere2"),
    norms={"input_layernorm": (*_QKV, *_GATED_MLP)},
)

PHI = replace(
    LLAMA,
    model_types=("phi",),
    final_norm="model.final_layernorm",
    norms={"input_layernorm": (*_QKV, "mlp.fc1")},
    output="self_attn.dense",
    writers=("self_attn.dense", "mlp.fc2"),
    down=("mlp.fc2",),
)

STARCODER2 = replace(
    LLAMA,
    model_types=("starcoder2",),
    norms={"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.c_fc",)},
    writers=("self_attn.o_proj", "mlp.c_proj"),
    down=("mlp.c_proj",),
)

OPT = ArchSpec(
    model_types=("opt",),
    layers="model.decoder.layers",
    final_norm="model.decoder.final_layer_norm",
    norms={"self_attn_layer_norm": _QKV, "final_layer_norm": ("fc1",)},
    attention="self_attn",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    writers=("self_attn.out_proj", "fc2"),
    down=("fc2",),
    positions="model.decoder.embed_positions",
    projections="model.decoder.project_*",
    obstacles=(("do_layer_norm_before", False, "its norms stand behind the residual additions"),),
)

GPT_NEOX = ArchSpec(
    model_types=("gpt_neox",),
    layers="gpt_neox.layers",
    final_norm="gpt_neox.final_layer_norm",
    norms={
        "input_layernorm": ("attention.query_key_value",),
        "post_attention_layernorm": ("mlp.dense_h_to_4h",),
    },
    attention="attention",
    value="attention.query_key_value",
    output="attention.dense",
    writers=("attention.dense", "mlp.dense_4h_to_h"),
    down=("mlp.dense_4h_to_h",),
    value_rows=_interleaved_values,
)

GPTJ = ArchSpec(
    model_types=("gptj",),
    layers="transformer.h",
    final_norm="transformer.ln_f",
    norms={"ln_1": ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")},
    attention="attn",
    value="attn.v_proj",
    output="attn.out_proj",
    writers=("attn.out_proj", "mlp.fc_out"),
    down=("mlp.fc_out",),
)

FAMILIES = (LLAMA, PHI3, GLM4, GEMMA2, OLMO2, COHERE, PHI, STARCODER2, OPT, GPT_NEOX, GPTJ)
"""Every structure, in the order in which an unknown model is compared with them."""

EXPERT_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Models whose experts compute `down(act(gate(x)) * up(x))` with the halves of `gate_up_proj`."""


def find_spec(model: nn.Module) -> ArchSpec:
    """Return the family of a Hugging Face causal model, by its config's `model_type` or else by its structure.

    A flag of its config can give a model the structure of another family than its `model_type` has by default.

    Raises:
        ValueError: no family has this structure, or a module or parameter of the model is not accounted for; it is
            named.
    """
    kind = model_type(model)
    declared = [spec for spec in FAMILIES if kind in spec.model_types]
    candidates = declared + [spec for spec in FAMILIES if spec not in declared and _has_structure(model, spec)]
    if not candidates:
        known = sorted(name for spec in FAMILIES for name in spec.model_types)
        raise ValueError(
            f"model_type={kind}: this architecture is not supported, and no supported one has its structure; "
            f"supported: {', '.join(known)}"
        )
    _check_experts(model, candidates[0])
    _check_sizes(model)
    gaps = [check_structure(model, spec) or check_coverage(model, spec) for spec in candidates]
    if all(gaps):
        standing = [check_coverage(model, spec) for spec in candidates if not check_structure(model, spec)]
        nearest = gaps[0] if declared or not standing else min(standing, key=len)
        raise ValueError(f"model_type={kind}: {nearest[0]}")
    return candidates[gaps.index([])]


def _check_experts(model: nn.Module, spec: ArchSpec) -> None:
    """Refuse experts of which nobody has looked at what they compute."""
    kind = model_type(model)
    sparse = any(present(layer, [spec.experts or ""]) for layer in decoder_layers(model, spec))
    if sparse and kind not in EXPERT_TYPES:
        raise ValueError(f"model_type={kind}: these experts are not supported; supported: {', '.join(EXPERT_TYPES)}")


def _check_sizes(model: nn.Module) -> None:
    """Refuse a model whose layers differ in the width of the stream or of heads."""
    config, kind = _config(model), model_type(model)
    require_equal_layers(config)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        value = getattr(config, name, None)
        if not isinstance(value, (int, type(None))):
            raise ValueError(f"model_type={kind}: {name}={value}: such models are not supported; it must be one number")


def _config(model: Any) -> Any:
    return model.config


def model_type(model: nn.Module) -> str:
    """Return what a model's Hugging Face config calls its family."""
    kind: str = _config(model).model_type
    return kind


def _has_structure(model: nn.Module, spec: ArchSpec) -> bool:
    """Return whether a model has a spec's layers, with the norms and linears that no layer of it lacks."""
    layers = _child(model, spec.layers)
    if not isinstance(layers, nn.ModuleList) or (spec.final_norm and _child(model, spec.final_norm) is None):
        return False
    needed = {*spec.norms, *spec.post_norms, spec.attention, spec.value, spec.output} - {""}
    return all(_child(layers[0], name) is not None for name in needed)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule called `name`, if there is one that is not None."""
    return dict(module.named_modules()).get(name)


def embedding_name(model: nn.Module) -> str:
    """Return the name of the token embedding."""
    return _name_of(model, "get_input_embeddings")


def head_name(model: nn.Module) -> str:
    """Return the name of the linear that computes logits."""
    return _name_of(model, "get_output_embeddings")


def is_tied(model: nn.Module) -> bool:
    """Return whether the head's weight is the embedding's, or another parameter in the same memory."""
    embedding, head = (model.get_parameter(f"{name(model)}.weight") for name in (embedding_name, head_name))
    return share_memory(head, embedding)


def tie(model: nn.Module) -> None:
    """Let the head's weight be the embedding's."""
    model.get_submodule(head_name(model)).weight = model.get_parameter(f"{embedding_name(model)}.weight")
    _config(model).tie_word_embeddings = True


def untie(model: nn.Module) -> None:
    """Give the head a weight of its own, equal to the embedding's, if it has none (without memory on meta)."""
    if is_tied(model):
        head = model.get_submodule(head_name(model))
        tied = head.get_parameter("weight")
        head.weight = nn.Parameter(tied.detach().clone(), requires_grad=tied.requires_grad)
    _config(model).tie_word_embeddings = False


def _name_of(model: nn.Module, getter: str) -> str:
    wanted = getattr(model, getter)()
    names: list[str] = [name for name, module in model.named_modules() if module is wanted]
    return names[0]


def decoder_layers(model: nn.Module, spec: ArchSpec) -> list[nn.Module]:
    """Return the decoder layers in order."""
    layers = model.get_submodule(spec.layers)
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def present(layer: nn.Module, names: Iterable[str]) -> list[str]:
    """Return those of `names` that this layer has (dense and sparse layers of one model differ)."""
    modules = dict(layer.named_modules())
    return [name for name in dict.fromkeys(names) if name and name in modules]


def down_widths(model: nn.Module, spec: ArchSpec) -> Iterator[int]:
    """Yield the input width of each MLP's last linear, of experts too."""
    for layer in decoder_layers(model, spec):
        for name in present(layer, spec.down):
            yield layer.get_submodule(name).get_parameter("weight").shape[1]
        for name in present(layer, [spec.experts] if spec.experts else []):
            yield layer.get_submodule(name).get_parameter("down_proj").shape[-1]


def check_structure(model: nn.Module, spec: ArchSpec) -> list[str]:
    """Return a complaint for each module without which a layer of the model is not what the spec says."""
    return [
        f"{spec.layers}.{index}.{complaint}, so it has not the structure of {spec.model_types[0]}"
        for index, layer in enumerate(decoder_layers(model, spec))
        for complaint in _layer_gaps(layer, spec)
    ]


def _layer_gaps(layer: nn.Module, spec: ArchSpec) -> Iterator[str]:
    """Yield what a layer lacks: parts of its attention, a norm before each reader and a reader behind each norm."""
    modules = dict(layer.named_modules())
    for name in (spec.attention, spec.value, spec.output, *spec.post_norms):
        if name not in modules:
            yield f"{name} is missing"
    last = [name for name in (*spec.down, spec.experts) if name]
    if not any(name in modules for name in last):
        yield f"{' or '.join(last)} is missing"
    for norm, names in spec.norms.items():
        readers = [name for name in names if name in modules]
        if norm and readers and norm not in modules:
            yield f"{norm} is missing before {', '.join(readers)}"
        if norm in modules and not readers:
            yield f"{norm or 'the residual stream'} is read by none of {', '.join(names)}"


def check_coverage(model: nn.Module, spec: ArchSpec) -> list[str]:
    """Return a complaint for each parameter of the model of which the spec does not say what it is."""
    known = roles(model, spec)
    return [
        f"nothing says whether {name} {tuple(parameter.shape)} touches the residual stream, so it cannot be rotated "
        "around; an ArchSpec in rotexp/models/arch.py has to name it"
        for name, parameter in model.named_parameters()
        if name not in known
    ]


def roles(model: nn.Module, spec: ArchSpec) -> dict[str, str]:
    """Return for each parameter that the spec accounts for what it is to the residual stream."""
    found: dict[str, str] = {}
    roots = {
        embedding_name(model): "writes: embedding",
        spec.positions: "writes: positions",
        spec.final_norm: "norm: folded into the head under R1",
        head_name(model): "reads: head",
    }
    modules = {name: model.get_submodule(name) for name in roots if name and _child(model, name) is not None}
    for name, module in modules.items():
        found |= {f"{name}.{parameter}": roots[name] for parameter in _handled(module)}
    for name, _ in model.named_parameters():
        if spec.projections and fnmatchcase(name, f"{spec.projections}.*"):
            found[name] = "deliberately not rotated: maps embeddings of another width"
    for index, layer in enumerate(decoder_layers(model, spec)):
        found |= {f"{spec.layers}.{index}.{name}": role for name, role in _layer_roles(layer, spec).items()}
    return found


def _layer_roles(layer: nn.Module, spec: ArchSpec) -> dict[str, str]:
    modules = dict.fromkeys(spec.norms, "norm: folded into its readers under R1")
    modules |= dict.fromkeys(spec.post_norms, "deliberately not rotated: a gain between writer and residual stream")
    modules |= dict.fromkeys(spec.readers, "reads")
    modules |= dict.fromkeys(spec.routers, "reads: router, not quantized")
    modules |= dict.fromkeys(spec.writers, "writes")
    if spec.experts:
        modules[spec.experts] = "reads and writes: experts"
    found = {
        f"{name}.{parameter}": modules[name]
        for name in present(layer, modules)
        for parameter in _handled(layer.get_submodule(name))
    }
    for name, _ in layer.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in spec.internal):
            found[name] = "deliberately not rotated: inside the attention, behind queries and keys"
    return found


def _handled(module: nn.Module) -> list[str]:
    """Return the module's own parameters of the names that are folded, rotated and merged."""
    own = (name for name, _ in module.named_parameters(recurse=False))
    return [name for name in own if name in ("weight", "bias", "gate_up_proj", "down_proj")]


def r1_obstacle(model: nn.Module, spec: ArchSpec) -> str | None:
    """Return why no rotation can act on the residual stream of a model, whose type is named, or None if one can."""
    obstacle = _r1_obstacle(model, spec)
    return None if obstacle is None else f"model_type={model_type(model)}: {obstacle}"


def _r1_obstacle(model: nn.Module, spec: ArchSpec) -> str | None:
    config = _config(model)
    for attribute, value, reason in spec.obstacles:
        if getattr(config, attribute, None) == value:
            return f"{attribute}={value}: {reason}"
    if spec.post_norms:
        return f"{' and '.join(spec.post_norms)} have a gain between a writer and the residual stream"
    if spec.final_norm is None or _child(model, spec.final_norm) is None:
        return f"{spec.final_norm or 'a last norm'} is missing: its head reads the residual stream without one"
    width = model.get_parameter(f"{embedding_name(model)}.weight").shape[1]
    if width != config.hidden_size:
        return f"its embeddings ({embedding_name(model)}) are {width} wide, its residual stream {config.hidden_size}"
    return None
