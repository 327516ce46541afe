"""A model's tokenizer: read from its files or from a GGUF file, or refused by the file that is at fault."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rotexp.errors.library import quiet_if_refused, refused
from rotexp.files.reading import UnreadableError, read_json, read_text
from rotexp.models.stored_model import StoredModel

TOKENIZER_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "dict.txt",
    "bpe.codes",
    "emoji.json",
    "normalizer.json",
)
"""Names of the files that make a tokenizer in transformers: a fast one, its slow sources, special tokens, templates."""

TEMPLATE_PATTERN = "additional_chat_templates/*.jinja"
"""Further chat templates, which have a folder of their own."""

CODE = (".py", ".pyc")
"""Code that lies beside a tokenizer (`tokenizer.py`); it is never run, and so is no part of it."""

TEXT = (".jinja", ".txt", ".bpe")
"""Files of UTF-8."""


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer in a folder."""
    return [file for file in _named(folder) if file.is_file()]


def _named(folder: Path) -> list[Path]:
    """Return what is named as a tokenizer's file, also broken links and folders of such a name."""
    beside = (
        path
        for path in folder.iterdir()
        if any(fnmatch(path.name, pattern) for pattern in TOKENIZER_PATTERNS)
        and path.suffix not in CODE
        and (path.suffix or not path.is_dir())
    )
    return sorted([*beside, *folder.glob(TEMPLATE_PATTERN)])


def load_tokenizer(checkpoint: StoredModel) -> Any:
    """Return the checkpoint's Hugging Face tokenizer; code that lies beside it is never run.

    Raises:
        ValueError: the checkpoint has none that can be read; the file at fault is named.
    """
    from transformers import AutoTokenizer

    place = Path(checkpoint.tokenizer)
    if place.suffix.lower() == ".gguf":
        line = f"model.path={place}: transformers cannot read the tokenizer in this GGUF file"
        with refused(lambda reason: f"{line} ({reason}); give the model as safetensors"), quiet_if_refused():
            return AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name, trust_remote_code=False)
    with refused(lambda reason: f"model.path={_fault(place, reason)}"), quiet_if_refused():
        return AutoTokenizer.from_pretrained(place, trust_remote_code=False)


def _fault(folder: Path, why: str) -> str:
    """Return what keeps transformers from reading a folder's tokenizer, and what to do.

    Args:
        why: transformers' own reason, which seldom names a file.
    """
    from transformers import __version__

    files = _named(folder)
    if not files:
        return f"{folder}: no tokenizer could be read there ({why}); add its files"
    for file in files:
        if fault := _broken(file):
            return f"{file}: {fault}; fetch the tokenizer's files again"
    code = code_of_its_own(folder)
    if code and "custom code" in why:
        own = "remove auto_map from its tokenizer_config.json to use the tokenizer.json there"
        remedy = own if (folder / "tokenizer.json").is_file() else "give a folder with a tokenizer.json"
        return f"{folder}: its tokenizer is code ({code}), which is never run; {remedy}"
    names = ", ".join(file.name for file in files if file.suffix != ".jinja")  # templates are mere text to transformers
    fault = f"transformers {__version__} cannot make a tokenizer of {names} ({why})"
    return f"{folder}: {fault}; fetch the tokenizer's files again, or use another transformers"


def _broken(file: Path) -> str:
    """Return what is wrong with a file by itself; empty if nothing that can be told."""
    if file.name == "tokenizer.json":
        return _fault_of(read_json, file) or _too_new(file)
    if file.suffix == ".json":
        return _fault_of(read_json, file)
    return _fault_of(read_text if file.suffix in TEXT else Path.read_bytes, file)


def _fault_of(read: Callable[[Path], str | bytes | dict[str, Any]], file: Path) -> str:
    try:
        content = read(file)
    except UnreadableError as error:
        return f"cannot be read ({error.reason})"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return "cannot be read (it is empty)" if content == b"" else ""


def _too_new(file: Path) -> str:
    """Return why the tokenizers library cannot read a file of its own format; empty if it can."""
    from tokenizers import Tokenizer, __version__

    try:
        with refused(str), quiet_if_refused():
            Tokenizer.from_file(str(file))
    except ValueError as error:
        return f"tokenizers {__version__} cannot read it ({error}): it is damaged, or of a newer version"
    return ""


def code_of_its_own(folder: Path) -> str:
    """Return the class in the code that lies beside a tokenizer and that its configuration names; empty if none."""
    try:
        named = read_json(folder / "tokenizer_config.json").get("auto_map", {})
    except UnreadableError:
        return ""
    classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
    return ", ".join(str(name) for name in classes if name) if isinstance(classes, list) else str(classes or "")
