"""Read a checkpoint's `config.json`: the Hugging Face config of its language model, or why there can be none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rotexp.errors.library import refused
from rotexp.files.reading import UnreadableError, lost_target, read_json

CONFIG_FILE = "config.json"
"""What tells a Hugging Face model's structure."""

QUANTIZED_KEYS = ("quantization_config", "compression_config")
"""Keys of a `config.json` whose weights are stored quantized."""

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What every config of a language model has at least one of."""

WIDTHS = ("hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
"""What is asked of a whole config, and must be the same in all of its layers."""

REMEDY = "fetch the model again"


def read_config(folder: Path) -> Any:
    """Return the whole Hugging Face config of a folder; code that lies beside it is never run.

    Raises:
        ValueError: there is none, transformers does not know its model type, or its weights are quantized.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    file = folder / CONFIG_FILE
    if target := lost_target(file):
        raise ValueError(f"model.path={file}: is a link to {target}, which is not there; {REMEDY}")
    if not file.is_file():
        raise ValueError(f"model.path={folder}: holds no config.json; name a Hugging Face checkpoint folder")
    described = _described(file)
    _require_unquantized(described, file)
    if described["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"model.path={file}: model_type={described['model_type']}: transformers {__version__} does not know it, "
            f"and code that comes with a model is never run; choose another model, or another transformers"
        )
    unusable = f"model.path={file}: transformers {__version__} cannot use it"
    with refused(lambda reason: f"{unusable} ({reason}); correct it, or {REMEDY}"):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def language_config(config: Any) -> Any:
    """Return the config of the causal language model: `config` itself, or the one a multimodal config holds.

    Raises:
        ValueError: transformers has no causal language model for it; the message names the model type, but no file.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind = config.model_type
    with refused(
        lambda reason: f"model_type={kind}: its language model cannot be told ({reason}); choose a text model"
    ):
        text = config.get_text_config(decoder=True)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = getattr(text, "model_type", repr(text))
        inside = "" if found == kind else f" (the language model of {kind})"
        raise ValueError(
            f"model_type={found}{inside}: transformers has no causal language model of this type; "
            f"choose a decoder-only model"
        )
    _require_sizes(text)
    require_equal_layers(text)
    return text


def _require_sizes(config: Any) -> None:
    """Refuse a model of no size, which transformers builds without a word."""
    for name in SIZES:
        size = config.to_dict().get(name)
        if isinstance(size, int) and size < 1:
            raise ValueError(f"model_type={config.model_type}: {name}={size} must be at least 1; correct its config")


def require_equal_layers(config: Any) -> None:
    """Refuse layers of several widths: transformers gives none for the whole model then, and rotations ask for one.

    Raises:
        ValueError: they differ; the model's type is named.
    """
    differing = sorted(set(WIDTHS) & set(getattr(config, "per_layer_attributes", None) or ()))
    if differing:
        raise ValueError(
            f"model_type={config.model_type}: its layers differ in {', '.join(differing)}, which is not supported; "
            f"choose a model whose layers have equal widths"
        )


def _described(file: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = read_json(file)
    except UnreadableError as error:
        raise ValueError(f"model.path={file}: cannot be read ({error.reason}); {REMEDY}") from None
    if not isinstance(described.get("model_type"), str):
        raise ValueError(f"model.path={file}: names no model_type; {REMEDY}")
    return described


def _require_unquantized(described: dict[str, Any], file: Path) -> None:
    for part in (described, *(value for value in described.values() if isinstance(value, dict))):
        for key in QUANTIZED_KEYS:
            if found := part.get(key):
                method = found.get("quant_method", key) if isinstance(found, dict) else key
                raise ValueError(
                    f"model.path={file}: its weights are stored quantized ({method}); rotations are trained on the "
                    f"model before quantization, so give the unquantized checkpoint"
                )
