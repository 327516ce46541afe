"""Every value of every config flag that may change what a supported model computes, from its config's class."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from families import FAMILIES, HEAD_DIM, LAYERS, Family
from transformers import PreTrainedConfig

ROW = "model and flag"
"""Property of a test's report that names its row of the table; the other properties are its columns."""

SIZE, TRAINING, TOKEN, NAME = "a size", "acts in training only", "names a token", "of the library, not of the model"
UNCHANGING = {
    **{field.name: NAME for field in dataclasses.fields(PreTrainedConfig)},
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer"), SIZE),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "max_position_embeddings", "n_positions"), SIZE),
    **dict.fromkeys(("num_experts", "num_local_experts", "moe_intermediate_size"), SIZE),
    **dict.fromkeys(("shared_expert_intermediate_size",), SIZE),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TOKEN),
    **dict.fromkeys(("attention_dropout", "dropout", "hidden_dropout", "classifier_dropout", "layerdrop"), TRAINING),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "embedding_dropout", "residual_dropout"), TRAINING),
    **dict.fromkeys(("initializer_range", "init_std", "router_aux_loss_coef", "router_jitter_noise"), TRAINING),
    "use_cache": "the rows are computed without",
    "pretraining_tp": "read by no model since transformers 5",
    "original_max_position_embeddings": "read with longrope only, which is among rope_parameters",
}
"""Fields that no row of the table is about, each with the reason."""

ACTIVATIONS = ("relu2", "gelu_new", "silu", "tanh")
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": STRETCHED,
    "llama3": STRETCHED | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": STRETCHED,
}
SLIDING_FIRST = ["sliding_attention", "full_attention"]
CHOSEN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "activation_function": ACTIVATIONS,
    "rope_parameters": (),
    "layer_types": (SLIDING_FIRST, SLIDING_FIRST[::-1], SLIDING_FIRST[:1] * LAYERS, SLIDING_FIRST[1:] * LAYERS),
    "no_rope_layers": ([0, 1], [1, 0], [0, 0], [1, 1]),
    "no_rope_layer_interval": (1, 2),
    "mlp_only_layers": ([0], [1], [0, 1]),
    "decoder_sparse_step": (2, 3),
    "num_experts_per_tok": (1, 3),
    "num_attention_heads": (2, 12),
    "n_head": (2, 12),
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 20),
    "rotary_dim": (4, 12),
    "sliding_window": (3, None),
    "max_window_layers": (0, 1),
    "word_embed_proj_dim": (16,),
    "query_pre_attn_scalar": (1, 64),
}
"""Values of fields that are neither switches nor numbers that may be anything."""

COMPANIONS: dict[str, dict[str, Any]] = {
    "layer_types": {"sliding_window": 4, "use_sliding_window": True},
    "use_sliding_window": {"sliding_window": 4, "max_window_layers": 1},
    "max_window_layers": {"sliding_window": 4, "use_sliding_window": True},
    "sliding_window": {"use_sliding_window": True, "max_window_layers": 1},
}
"""What else is set with a field, where the config has it, so that it acts."""


@dataclass(frozen=True)
class Case:
    """One value of one flag of a family, or (no flag) the family as it is."""

    family: str
    flag: str = ""
    value: Any = None

    def __str__(self) -> str:
        if isinstance(self.value, dict):
            rope = self.value.get("full_attention", self.value)
            return f"{self.family} {self.flag}={rope['rope_type']} of {rope['partial_rotary_factor']}"
        return f"{self.family} {self.flag}={self.value}" if self.flag else self.family

    @property
    def is_switch(self) -> bool:
        """Whether the flag is on or off."""
        return isinstance(self.value, bool)

    def config(self) -> Any:
        """Return the small family's Hugging Face config with the flag set."""
        family = BY_TYPE[self.family]
        if not self.flag:
            return family.config()
        names = {field.name for field in dataclasses.fields(type(family.config()))}
        others = {name: value for name, value in COMPANIONS.get(self.flag, {}).items() if name in names}
        return family.config(**others | {self.flag: copy.deepcopy(self.value)})  # Phi-3's changes what it is given


def _by_type() -> dict[str, Family]:
    """Return the first small model of every supported `model_type`."""
    found: dict[str, Family] = {}
    for family in FAMILIES.values():
        found.setdefault(family.config().model_type, family)
    return found


BY_TYPE = _by_type()


def cases() -> Iterator[Case]:
    """Yield every family as it is and with each value of each of its flags."""
    for model_type, family in BY_TYPE.items():
        yield Case(model_type)
        config = family.config()
        for field in dataclasses.fields(config):
            if field.name not in UNCHANGING:
                for value in values(field, getattr(config, field.name)):
                    yield Case(model_type, field.name, value)


def values(field: Any, now: Any) -> Iterator[Any]:
    """Yield the values to try of a field of a config's class.

    Raises:
        LookupError: it is of a kind for which values have to be named in `CHOSEN`, or a reason in `UNCHANGING`.
    """
    kinds = set(typing.get_args(field.type)) or {field.type}
    if field.name in CHOSEN:
        yield from (_ropes(now) if field.name == "rope_parameters" else CHOSEN[field.name])
    elif bool in kinds:
        yield from (value for value in (True, False) if value is not now)
    elif float in kinds:
        yield from (2.0, 50.0) if now is None else (3.0 * now, 0.5 * now)
        yield from (None,) if now is not None and type(None) in kinds else ()
    elif int in kinds:
        yield from (3,) if now is None else (now + 1,)
        yield from (None,) if now is not None and type(None) in kinds else ()
    else:
        raise LookupError(f"{field.name}: {field.type}: name its values in CHOSEN, or a reason in UNCHANGING")


def _ropes(now: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every kind of rotary positions with the share of a head that they turn now, then other shares."""
    nested = SLIDING_FIRST if "full_attention" in now else []
    share = (now["full_attention"] if nested else now).get("partial_rotary_factor", 1.0)
    pairs = int(HEAD_DIM * share) // 2
    factors = {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs}
    kinds = [(kind, options, share) for kind, options in ROPES.items()]
    for kind, options, turned in [*kinds, *(("default", {}, other) for other in (0.5, 1.0))]:
        value = {"rope_type": kind, "rope_theta": 1e4, "partial_rotary_factor": turned, **options}
        value |= factors if kind == "longrope" else {}
        yield dict.fromkeys(nested, value) or value
