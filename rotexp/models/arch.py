"""What rotexp has to know of a model family: which modules read and write the residual stream.

A family is data, an `ArchSpec`; every module name below is relative to a decoder layer unless it says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ArchSpec:
    """One decoder-only family.

    Attributes:
        model_types: the `model_type` values of Hugging Face configs it covers.
        embedding, head, layers, final_norm: names from the model's root.
        norms: each norm of a layer, and the linears that read its output (its gain is folded into them).
        attention: the module that computes attention.
        value, output: the linears around the attention product; R2 acts between them.
        writers: the linears that write to the residual stream.
        down: the MLP's last linear; R4 acts at its input.
    """

    model_types: tuple[str, ...]
    embedding: str
    head: str
    layers: str
    final_norm: str
    norms: dict[str, tuple[str, ...]]
    attention: str
    value: str
    output: str
    writers: tuple[str, ...]
    down: str

    @property
    def readers(self) -> tuple[str, ...]:
        """The linears of a layer that read the residual stream."""
        return tuple(name for names in self.norms.values() for name in names)


LLAMA = ArchSpec(
    model_types=("llama",),
    embedding="model.embed_tokens",
    head="lm_head",
    layers="model.layers",
    final_norm="model.norm",
    norms={
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    attention="self_attn",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    writers=("self_attn.o_proj", "mlp.down_proj"),
    down="mlp.down_proj",
)

SPECS = {model_type: spec for spec in (LLAMA,) for model_type in spec.model_types}


def find_spec(model_type: str) -> ArchSpec:
    """Return the family of a config's `model_type`.

    Raises:
        ValueError: the family is not supported; the message lists those that are.
    """
    if model_type not in SPECS:
        raise ValueError(
            f"model_type={model_type}: this architecture is not supported yet; supported: {', '.join(sorted(SPECS))}"
        )
    return SPECS[model_type]
