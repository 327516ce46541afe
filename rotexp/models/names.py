"""The names a checkpoint stores a model's parameters under: other prefixes, renamed routers, one tensor an expert."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from rotexp.models.checkpoint import ExpertStack, Shape, Source

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
