"""Which files of a checkpoint folder are its weights: those that transformers reads, in its order."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from rotexp.errors.wording import few
from rotexp.files.reading import UnreadableError, lost_target, read_json
from rotexp.models.hf_config import REMEDY
from rotexp.models.weight_files import FileWeights, PickledWeights, SafetensorsWeights, why_unreadable

FILES: dict[str, type[FileWeights]] = {".safetensors": SafetensorsWeights, ".bin": PickledWeights}
"""What reads files of weights that have their config beside them, by suffix."""

INDEX = ".index.json"

USUAL_SAFETENSORS = ("model.safetensors", f"model.safetensors{INDEX}")
USUAL = (*USUAL_SAFETENSORS, "pytorch_model.bin", f"pytorch_model.bin{INDEX}")
"""The names that transformers looks for, the first that is there being read (5.24, `_get_resolved_checkpoint_files`).

Others, such as `model.fp16.safetensors` or `consolidated.safetensors`, are read where they are asked for only.
"""

ADAPTER = "adapter_config.json"


def is_weights(file: Path) -> bool:
    """Return whether a name is that of a file of weights which has its config beside it, or of an index of such."""
    return Path(file.name.lower().removesuffix(INDEX)).suffix in FILES


def file_weights(file: Path, *, folder: Path | None = None) -> FileWeights:
    """Return the weights of one file, or of those that an index assigns tensors to.

    transformers reads a tensor that several files hold from the last, whatever the index says of it.

    Args:
        folder: what an index's names are relative to (None: its own folder).

    Raises:
        ValueError: the index cannot be read, leads out of its folder, or a file that it names is missing.
    """
    kind = FILES[Path(file.name.lower().removesuffix(INDEX)).suffix]
    if not file.name.lower().endswith(INDEX):
        return kind((file,))
    folder = folder or file.parent
    assigned = {name: folder / shard for name, shard in _assigned(file).items()}
    files = tuple(sorted(set(assigned.values())))
    if absent := [str(shard.relative_to(folder)) for shard in files if not shard.is_file()]:
        raise ValueError(
            f"model.path={folder}: {few(absent)} of its index is missing{_unfinished(folder)}; fetch the model again"
        )
    return kind(files, assigned)


def folder_weights(folder: Path, *, named: str | None = None) -> FileWeights:
    """Return the weights of a checkpoint folder.

    Args:
        named: the file that its config names (`transformers_weights`), which then is the only one to be looked for.

    Raises:
        ValueError: there are none, or as `file_weights`.
    """
    if named is not None:
        if not is_weights(Path(named)) or not _is_inside(named) or not (folder / named).is_file():
            raise ValueError(
                f"model.path={folder}: transformers_weights={named} of its config.json must be a file of weights in "
                f"this folder, or an index; correct it"
            )
        return file_weights(folder / named)
    if found := next((folder / name for name in USUAL if (folder / name).is_file()), None):
        return file_weights(found)
    for name in USUAL:
        if target := lost_target(folder / name):
            raise ValueError(f"model.path={folder / name}: is a link to {target}, which is not there; {REMEDY}")
    weights = (file for file in folder.iterdir() if is_weights(file) or file.suffix.lower() == ".gguf")
    others = sorted(file.name for file in weights if file.is_file())
    instead = f" under a usual name, only {few(others)}; name one of its files, or" if others else ";"
    allowed = "model.safetensors or pytorch_model.bin (or the index of either)"
    raise ValueError(
        f"model.path={folder}: holds no weights{_unfinished(folder)}{instead} a folder with config.json and {allowed} "
        f"is needed"
    )


def require_model(folder: Path) -> None:
    """Refuse a folder that holds something else than a model with its config.

    Raises:
        ValueError: it holds an adapter, or GGUF files only.
    """
    if (folder / ADAPTER).is_file():
        held = next((name for name in USUAL if (folder / name).is_file()), None)
        alone = f", or name {folder / held} to read it without" if held else ""
        raise ValueError(
            f"model.path={folder}: holds an adapter such as LoRA's ({ADAPTER}); merge it into its base model and give "
            f"that folder{alone}"
        )
    files = sorted(file.name for file in folder.glob("*") if file.suffix.lower() == ".gguf")
    if files and not (folder / "config.json").is_file():
        raise ValueError(f"model.path={folder}: holds GGUF files; name one of them: {few(files)}")


def _assigned(index: Path) -> dict[str, str]:
    """Return the file of each tensor as an index assigns it, relative to the model's folder.

    Raises:
        ValueError: it cannot be read, or names files elsewhere.
    """
    try:
        named = read_json(index).get("weight_map")
    except UnreadableError as error:
        reason = why_unreadable(index, expected="json") or error.reason
        raise _names_none(index, reason) from None
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise _names_none(index, "it holds no weight_map, from tensors to files")
    outside = [file for file in named.values() if not _is_inside(file)]
    if outside:
        raise ValueError(f"model.path={index}: must name files in its folder, not {few(outside)}; fetch it again")
    if not named:
        raise _names_none(index, "its weight_map is empty")
    return named


def _names_none(index: Path, reason: str) -> ValueError:
    return ValueError(f"model.path={index}: names no files of weights ({reason}); {REMEDY}")


def _is_inside(file: str) -> bool:
    """Return whether a file's name leads nowhere but below the folder it is relative to."""
    path = PurePosixPath(file)
    return bool(path.name) and not path.is_absolute() and ".." not in path.parts


def _unfinished(folder: Path) -> str:
    """Return that a download was not finished, where one left its traces: in the folder, or in the hub's cache."""
    places = (folder, folder / ".cache" / "huggingface" / "download", folder.parent.parent / "blobs")
    found = any(next(place.glob("*.incomplete"), None) for place in places)
    return " (its download was not finished)" if found else ""
