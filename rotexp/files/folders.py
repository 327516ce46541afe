"""Folders that are complete or absent, and files that are the old ones or the new ones."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGGER = logging.getLogger(__name__)

LOCK_FILE = ".lock"


def check_free(target: Path, *, key: str) -> None:
    """Refuse a place that holds something.

    Args:
        key: the configuration's key that named it, for the message.

    Raises:
        ValueError: it is a file, or a folder that is not empty.
    """
    if target.is_dir() and any(target.iterdir()):
        raise ValueError(f"{key}={target}: is a folder that is not empty; choose another, or empty it")
    if target.exists() and not target.is_dir():
        raise ValueError(f"{key}={target}: is a file; name a folder to make")


def make_folder(folder: Path, *, key: str) -> None:
    """Make a folder, and those above it, where they are not there yet.

    Args:
        key: the configuration's key that named it, for the message.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{key}={folder}: cannot be made ({error.strerror}); choose another folder") from None


@contextmanager
def claimed(folder: Path, *, key: str) -> Iterator[None]:
    """Hold a folder, which is made if need be, so that no other process works in it meanwhile.

    Where the file system knows no locks, nothing is held.

    Args:
        key: the configuration's key that named it, for the message.

    Raises:
        ValueError: another process holds it, or it cannot be made.
    """
    make_folder(folder, key=key)
    with (folder / LOCK_FILE).open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{key}={folder}: another process runs in it; wait, or choose another") from None
        except OSError as error:
            LOGGER.warning("%s cannot be locked (%s); start nothing else in it", folder, error.strerror)
        yield


@contextmanager
def complete_folder(target: Path, *, key: str) -> Iterator[Path]:
    """Yield an empty folder beside `target` that becomes it, flushed to the disk, when the block ends well.

    Args:
        key: the configuration's key that named it, for the message.

    Raises:
        ValueError: `target` is a file, or a folder that is not empty.
    """
    check_free(target, key=key)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    aside.mkdir()
    try:
        yield aside
        for path in (*aside.rglob("*"), aside):
            _share(path, mode=aside.stat().st_mode)
            flush(path)
        aside.rename(target)  # onto nothing, or onto an empty folder
        flush(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old one or the new one, whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        flush(aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _share(path: Path, *, mode: int) -> None:
    """Let those read a file who may read the folder of that mode; safetensors leaves it to its owner alone."""
    if path.is_file():
        path.chmod(mode & 0o666)
