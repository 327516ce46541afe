"""Fetch a model's files from the Hugging Face hub: what describes it first, its weights once they are wanted."""

from __future__ import annotations

from pathlib import Path

from rotexp.models.tokenizer import TEMPLATE_PATTERN, TOKENIZER_PATTERNS
from rotexp.models.weight_folder import USUAL_SAFETENSORS

DESCRIPTION = ("*.json", *TOKENIZER_PATTERNS)
SAFETENSORS = ("*.safetensors",)
PICKLED = ("pytorch_model*.bin",)
UNWANTED = ("*/*", "consolidated*", "*.py")
"""Copies in other formats that some repositories hold beside their Hugging Face files, and code."""


def fetch_description(repository: str, *, revision: str | None) -> Path:
    """Fetch config and tokenizer; return the folder, which is named by the commit.

    Raises:
        ValueError: the hub did not give it.
    """
    folder = _fetch(repository, revision, DESCRIPTION)
    return _fetch(repository, folder.name, (TEMPLATE_PATTERN,), unwanted=())


def fetch_weights(repository: str, *, revision: str) -> Path:
    """Fetch the weights of a commit, pickled ones only where there are no usual safetensors; return the folder.

    Raises:
        ValueError: the hub did not give it.
    """
    folder = _fetch(repository, revision, SAFETENSORS)
    usual = any((folder / name).is_file() for name in USUAL_SAFETENSORS)
    return folder if usual else _fetch(repository, revision, PICKLED)


def _fetch(
    repository: str, revision: str | None, patterns: tuple[str, ...], *, unwanted: tuple[str, ...] = UNWANTED
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(unwanted)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        asked = f" revision={revision}" if revision else ""
        raise ValueError(
            f"model.path={repository}{asked}: no such folder, and the hub did not give it ({reason}); name a folder"
        ) from None
    return Path(folder)
