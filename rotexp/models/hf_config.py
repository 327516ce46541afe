"""Read a checkpoint's `config.json`: the Hugging Face config of its language model, or why there can be none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUANTIZED_KEYS = ("quantization_config", "compression_config")
"""Keys of a `config.json` whose weights are stored quantized."""


def read_config(folder: Path) -> Any:
    """Return the whole Hugging Face config of a folder; code that lies beside it is never run.

    Raises:
        ValueError: there is none, transformers does not know its model type, or its weights are quantized.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"model.path={folder}: holds no config.json; name a Hugging Face checkpoint folder")
    described = _described(file)
    _require_unquantized(described, folder)
    if described["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={described['model_type']}: transformers {__version__} does not know it, and code that comes "
            f"with a model is never run; choose another model, or another transformers"
        )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"model.path={file}: transformers cannot use it ({reason}); fetch the model again") from None


def language_config(config: Any) -> Any:
    """Return the config of the causal language model: `config` itself, or the one a multimodal config holds.

    Raises:
        ValueError: transformers has no causal language model for it.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        inside = "" if text.model_type == config.model_type else f" (the language model of {config.model_type})"
        raise ValueError(
            f"model_type={text.model_type}{inside}: transformers has no causal language model of this type; "
            f"choose a decoder-only model"
        )
    return text


def _described(file: Path) -> dict[str, Any]:
    try:
        described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        described["model_type"] = str(described["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"model.path={file}: names no model_type ({reason}); fetch the model again") from None
    return described


def _require_unquantized(described: dict[str, Any], folder: Path) -> None:
    for part in (described, *(value for value in described.values() if isinstance(value, dict))):
        for key in QUANTIZED_KEYS:
            if found := part.get(key):
                method = found.get("quant_method", key) if isinstance(found, dict) else key
                raise ValueError(
                    f"model.path={folder}: its weights are stored quantized ({method}); rotations are trained on the "
                    f"model before quantization, so give the unquantized checkpoint"
                )
