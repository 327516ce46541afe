"""The names a checkpoint stores a model's parameters under: other prefixes, renamed routers, one tensor an expert.

Whether all are there is checked here too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from rotexp.errors.wording import few
from rotexp.models.stored_model import ExpertStack, Shape, Source

LANGUAGE_MODEL_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")
"""What multimodal checkpoints put before the names of their language model's base, the newest manner first."""

RENAMED_MODULES = (
    ("mlp.gate.", "block_sparse_moe.gate."),
    ("mlp.router.", "block_sparse_moe.gate."),
    ("lm_head.", "embed_out."),
)
"""Modules as transformers 5 names them, and as the checkpoints of Mixtral, Phi-3.5-MoE and GPT-NeoX do."""

EXPERT_TENSORS = (
    ("mlp.experts.gate_up_proj", "mlp.experts.{}.", ("gate_proj.weight", "up_proj.weight")),
    ("mlp.experts.down_proj", "mlp.experts.{}.", ("down_proj.weight",)),
    ("mlp.experts.gate_up_proj", "block_sparse_moe.experts.{}.", ("w1.weight", "w3.weight")),
    ("mlp.experts.down_proj", "block_sparse_moe.experts.{}.", ("w2.weight",)),
)
"""The parameter in which transformers 5 fuses experts, the place of one expert in a checkpoint, its tensors in order.

The first two rows are Qwen's (also OLMoE's and DeepSeek's), the others Mixtral's.
"""

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Modules that torch puts around those it compiles, shards by FSDP1 or checkpoints, wherever in a name."""

QUANTIZED = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|SCB|absmax|nested_absmax|quant_map|quant_state\..+|input_scale"
    r"|weight_(packed|scale|scale_inv|zero_point|shape))$"
)
"""Tensors of GPTQ, AWQ, bitsandbytes, fp8 and compressed-tensors."""

ADAPTED = re.compile(r"\.(lora_[AB]|lora_embedding_[AB]|base_layer)\.")
"""Tensors of a model with adapters that were not merged."""


def plain_names(
    stored: Collection[str], expected: Mapping[str, Shape], *, base: str, nested: bool, embedding: str, identity: str
) -> dict[str, str]:
    """Return the stored name of every tensor by its name without what a wrapper put before it (`module.`).

    Wrappers that torch is known to use are left out wherever they stand. Any other prefix is, where no parameter of the
    base model has its own name, and the embedding is found under one prefix that fits best.

    Args:
        embedding: the name of the token embedding; the others as in `find_sources`.

    Raises:
        ValueError: two tensors come to the same name, or several prefixes fit equally.
    """
    names: dict[str, str] = {}
    for name in stored:
        plain = ".".join(part for part in name.split(".") if part not in WRAPPERS)
        if plain in names:
            raise ValueError(f"model.path={identity}: {names[plain]} and {name} are one parameter; keep one of them")
        names[plain] = name
    inside = {name: shape for name, shape in expected.items() if name.startswith(f"{base}.")}
    if _num_found(inside, names, base=base, nested=nested):
        return names
    fits = {prefix: _without(prefix, names) for prefix in _prefixes(embedding, names, base=base, nested=nested)}
    found = {prefix: _num_found(expected, fit, base=base, nested=nested) for prefix, fit in fits.items()}
    best = [prefix for prefix, count in found.items() if count == max(found.values())]
    outermost = [prefix for prefix in best if not any(prefix.startswith(other) for other in best if other != prefix)]
    if len(outermost) > 1:
        raise ValueError(
            f"model.path={identity}: holds several models, whose names begin with {few(outermost)}; keep one of them"
        )
    return fits[outermost[0]] if outermost else names


def find_sources(
    expected: Mapping[str, Shape], stored: Collection[str], *, base: str, nested: bool
) -> dict[str, Source]:
    """Return where each parameter is stored: under its own name if nowhere, so that it is missed by that.

    Args:
        expected: every parameter's shape.
        base: the model's `base_model_prefix`, which is absent where the base model was saved.
        nested: whether the model is the language part of a multimodal checkpoint.
    """
    return {name: _find(name, shape, stored, base=base, nested=nested) for name, shape in expected.items()}


def stored_shapes(expected: Mapping[str, Shape], sources: Mapping[str, Source]) -> dict[str, Shape]:
    """Return the shape that each stored tensor must have for the parameters to have those `expected`."""
    shapes: dict[str, Shape] = {}
    for name, shape in expected.items():
        source = sources[name]
        shapes |= {source: shape} if isinstance(source, str) else source.stored_shapes()
    return shapes


def language_tensors(stored: Mapping[str, Shape], needed: Iterable[str], *, embedding: str) -> dict[str, Shape]:
    """Leave out what a multimodal checkpoint stores of its other parts: what is not needed and not beside `embedding`.

    Args:
        embedding: the name under which the token embedding is stored (`language_model.model.embed_tokens.weight`).
    """
    kept, prefix = set(needed), ".".join(embedding.split(".")[:-2])
    return {name: shape for name, shape in stored.items() if name in kept or name.startswith(f"{prefix}.")}


def _find(name: str, shape: Shape, stored: Collection[str], *, base: str, nested: bool) -> Source:
    spellings = list(_spellings(name, base=base, nested=nested))
    for spelling in spellings:
        if spelling in stored:
            return spelling
    stacks = (stack for spelling in spellings for stack in _stacks(spelling, shape))
    return next((stack for stack in stacks if any(part in stored for part in stack.stored_shapes())), name)


def _spellings(name: str, *, base: str, nested: bool) -> Iterator[str]:
    """Yield the names a whole parameter may have, the likeliest first."""
    inner = name.removeprefix(f"{base}.")
    names = [name, *([f"{prefix}{inner}" for prefix in LANGUAGE_MODEL_PREFIXES] if nested else ()), inner]
    for spelling in names:
        yield spelling
        yield from (spelling.replace(new, old) for new, old in RENAMED_MODULES if new in spelling)


def _stacks(name: str, shape: Shape) -> Iterator[ExpertStack]:
    """Yield the ways in which the experts of a parameter may be stored one by one."""
    for parameter, place, tensors in EXPERT_TENSORS:
        if name.endswith(parameter):
            experts = [name.replace(parameter, place.format(expert)) for expert in range(shape[0])]
            yield ExpertStack(tuple(tuple(f"{expert}{part}" for part in tensors) for expert in experts), shape[1:])


def _num_found(expected: Mapping[str, Shape], stored: Collection[str], *, base: str, nested: bool) -> int:
    """Return how many stored tensors are parts of parameters."""
    sources = find_sources(expected, stored, base=base, nested=nested)
    return len(stored_shapes(expected, sources).keys() & set(stored))


def _prefixes(embedding: str, stored: Collection[str], *, base: str, nested: bool) -> list[str]:
    """Return what stands before the embedding's name, the shortest first, those of one length by name."""
    endings = [f".{spelling}" for spelling in _spellings(embedding, base=base, nested=nested)]
    found = {name.removesuffix(ending) + "." for name in stored for ending in endings if name.endswith(ending)}
    return sorted(sorted(found), key=len)


def _without(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the names without a prefix; those that do not have it, or would be as another, stay as they are."""
    shorter = {name: name.removeprefix(prefix) for name in names}
    return {name if shorter[name] in names else shorter[name]: stored for name, stored in names.items()}


def check_names(expected: dict[str, Shape], stored: dict[str, Shape], *, identity: str, ignored: Iterable[str]) -> None:
    """Compare the tensors a model needs with those of its checkpoint.

    Args:
        ignored: patterns of names that a checkpoint may hold although no parameter is called so.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; the first of each kind are named.
    """
    missing = sorted(expected.keys() - stored.keys())
    patterns = [re.compile(pattern) for pattern in ignored]
    unneeded = sorted(stored.keys() - expected.keys())
    unexpected = [name for name in unneeded if not any(pattern.search(name) for pattern in patterns)]
    misshapen = [
        f"{name} ({list(stored[name])} instead of {list(shape)})"
        for name, shape in sorted(expected.items())
        if name in stored and stored[name] != shape
    ]
    named = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
    faults = [f"{fault}: {few(names)}" for fault, names in named if names]
    if not faults:
        return
    if quantized := next((name for name in unexpected if QUANTIZED.search(name)), None):
        raise ValueError(
            f"model.path={identity}: its weights are stored quantized (such as {quantized}); rotations are trained on "
            f"the model before quantization, so give the unquantized checkpoint"
        )
    if adapted := next((name for name in unexpected if ADAPTED.search(name)), None):
        raise ValueError(
            f"model.path={identity}: holds an adapter that is not merged (such as {adapted}); merge it into the model, "
            f"and give that"
        )
    raise ValueError(f"model.path={identity}: tensors do not fit its config.json; {'; '.join(faults)}")
