"""Which files a key names: one, those of a folder, or those that match a pattern; in an order that never changes."""

from __future__ import annotations

import glob
import os
import re
import stat
from pathlib import Path

REMEDY = "give the path of an existing UTF-8 text file"

PACKED_ENDINGS = (".gz", ".bz2", ".xz", ".lzma")

OF_THIS_COMMAND = re.compile(r"/dev/(fd/|std(in|out|err)$)|/proc/[^/]+/(task/[^/]+/)?fd/")
"""Paths that mean something else to another process: pipes of the shell, standard input."""

ADDRESS = re.compile(r"(^|/)(https?|ftp|s3|gs|hf):/")
"""A path that begins with a protocol, or what is left of it when it is made absolute."""


def find_files(named: Path, *, key: str) -> list[Path]:
    """Return the files that a path names: itself, a folder's, or those of a pattern with `*`, `?`, `[…]` and `**`.

    Hidden files and folders are left out, and the files of a folder, taken with its subfolders but not with links to
    other folders, must be of one kind by their names' endings, since beside a text its license or description often
    lies. Files are ordered by their names.

    Args:
        named: an absolute path or pattern; a file that has that very name goes before the pattern.
        key: the configuration key that named it, for the error.

    Raises:
        ValueError: it names no file, or something that cannot be read twice: a pipe, a device.
    """
    where = f"{key}={named}"
    try:
        match _kind(named):
            case None:
                files = _matches(named, where)
            case "folder":
                files = _files_of(named, where)
            case _:
                files = [named]
        for file in files:
            _require_regular(file, where if file == named else f"{where}: {file}")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ValueError(f"{where}: cannot be read ({reason}); check the path and its permissions") from None
    return files


def _kind(path: Path) -> str | None:
    """Say what lies at a path; None where nothing does.

    Raises:
        OSError: it cannot be looked at.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _require_regular(path: Path, where: str) -> None:
    """Refuse what cannot be read twice: a run that is resumed, evaluated or repeated reads its texts again."""
    kind = "a pipe or file of this command alone" if OF_THIS_COMMAND.match(str(path)) else _kind(path)
    if kind is None:
        raise ValueError(f"{where}: is a link to {os.readlink(path)}, which is missing; fetch it again")
    if kind != "file":
        raise ValueError(
            f"{where}: is {kind}, which a resumed or repeated run could not read again; write the text to a file "
            f"first, and name that"
        )


def _files_of(folder: Path, where: str) -> list[Path]:
    """Return the files of a folder and its subfolders, if they are of one kind."""
    files: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if not name.startswith(".")]
    if not files:
        raise ValueError(f"{where}: is a folder without files; name one that holds texts")
    endings = sorted({"".join(_endings(file)) or "no ending" for file in files})
    if len(endings) > 1:
        some = next(ending for ending in endings if ending != "no ending")
        raise ValueError(
            f"{where}: is a folder of several kinds of files ({', '.join(endings[:8])}); name those that are meant by "
            f"a pattern, as in '{folder}/**/*{some}'"
        )
    return sorted(files, key=lambda file: file.relative_to(folder).parts)


def _endings(file: Path) -> list[str]:
    """Return what a name ends in; behind `.gz` and the like, what the unpacked file's would."""
    return file.suffixes[-2:] if file.suffix in PACKED_ENDINGS else file.suffixes[-1:]


def _raise(error: OSError) -> None:
    raise error


def _matches(pattern: Path, where: str) -> list[Path]:
    """Return the files that a pattern matches.

    Raises:
        ValueError: none does, or the path is no pattern, and nothing lies there.
    """
    text = str(pattern)
    if OF_THIS_COMMAND.match(text) or pattern.is_symlink():
        return [pattern]
    if ADDRESS.search(text):
        raise ValueError(f"{where}: is an address; download the file, and name where it lies")
    if not glob.has_magic(text):
        raise ValueError(f"{where}: no such file; {REMEDY}")
    files = [path for name in glob.glob(text, recursive=True) if not (path := Path(name)).is_dir()]
    if not files:
        raise ValueError(f"{where}: no file matches; correct the pattern (hidden files never match)")
    return sorted(files, key=lambda file: file.parts)
