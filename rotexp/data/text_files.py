"""Read text from files: plain, packed, or one field of JSON Lines or Parquet; no more of it than is asked for."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rotexp.data.formats import HEAD_BYTES, Format, recognize
from rotexp.data.named_files import PACKED_ENDINGS, find_files
from rotexp.data.rows import fields_of, values

DOCUMENT_BORDER = "\n\n"
"""What stands between two documents: a blank line, as between WikiText's rows in published evaluations."""

CHUNK_BYTES = 1 << 20

UNPACKING: dict[Format, Callable[[IO[bytes]], object]] = {
    Format.gzip: lambda raw: gzip.GzipFile(fileobj=raw),
    Format.bzip2: bz2.BZ2File,
    Format.xz: lzma.LZMAFile,
}

NOT_PROSE = {".csv": "a table", ".tsv": "a table", ".pkl": "a pickle", ".pickle": "a pickle"}
"""What names say of files that look like prose."""


@dataclass(frozen=True)
class TextFiles:
    """The files of one text, which are read in this order.

    Attributes:
        key: the configuration key that named them, for errors.
        path: what was named: a file, a folder or a pattern.
        has_rows: whether they are JSON Lines or Parquet, and not plain text.
    """

    key: str
    path: Path
    files: tuple[Path, ...]
    has_rows: bool

    def read(self, *, field: str | None, at_most: int | None = None) -> str:
        """Return the text.

        A file of plain text is one document, and so is a row's field of JSON Lines or Parquet; documents are joined by
        a blank line, empty ones too. Files are read only as far as the text goes.

        Args:
            field: of rows, which field holds the text.
            at_most: characters (None: all).

        Raises:
            ValueError: a file cannot be read, is no UTF-8 text, has not that field, is of another form than the first
                one, or all are blank.
        """
        documents = (document for file in self.files for document in self._documents(file, field))
        text = _beginning(_joined(documents), at_most)
        if not text.strip():
            raise ValueError(f"{self.key}={self.path}: is empty; give a file that contains text")
        return text

    def _documents(self, file: Path, field: str | None) -> Iterator[Iterable[str]]:
        """Yield the documents of a file, each in parts."""
        with _opened(file, _place(self.key, self.path, file)) as (stream, form, where):
            if (form is not Format.text) != self.has_rows:
                raise ValueError(
                    f"{where}: is {form.value}, and {self.files[0]} is not; name files of one kind, by a pattern"
                )
            if form is Format.text:
                yield _plain_parts(stream, where=where)
            elif field is None:
                fields = fields_of(stream, form, where=where)
                raise ValueError(f"{where}: is {form.value}; set data.field to the one that holds the text ({fields})")
            else:
                yield from ((text,) for text in values(stream, form, field, where=where))


def find_text(path: Path, *, key: str) -> TextFiles:
    """Find the files of a text, and see whether they hold rows: one file, or those of a folder or a pattern.

    Args:
        path: absolute; a file's content and not its name says how it is read, also where it is packed.
        key: the configuration key that named it, for errors.

    Raises:
        ValueError: nothing is there, or the first file cannot be read, or is known to be no text.
    """
    files = find_files(path, key=key)
    with _opened(files[0], _place(key, path, files[0])) as (_stream, form, _where):
        return TextFiles(key, path, tuple(files), has_rows=form is not Format.text)


def _place(key: str, path: Path, file: Path) -> str:
    """Return what an error begins with: the key, what it names, and which file of that."""
    return f"{key}={path}" if file == path else f"{key}={path}: {file}"


def _joined(documents: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the parts of all documents, with a border between two."""
    for number, parts in enumerate(documents):
        if number:
            yield DOCUMENT_BORDER
        yield from parts


def _beginning(parts: Iterable[str], at_most: int | None) -> str:
    """Return the first characters of a text that comes in parts, and take no more parts than these need."""
    kept: list[str] = []
    missing = at_most
    for part in parts:
        kept.append(part[:missing])
        if missing is not None:
            missing -= len(kept[-1])
            if not missing:
                break
    return "".join(kept)


@contextmanager
def _opened(file: Path, where: str) -> Iterator[tuple[IO[bytes], Format, str]]:
    """Open a file; yield its bytes, unpacked if it is packed, what they are, and what an error begins with."""
    with _readable(where), file.open("rb") as raw:
        packed = _format(raw, file.name, where=where)
        if packed not in UNPACKING:
            yield raw, packed, where
            return
        where = f"{where} (unpacked)"
        name = file.name if file.suffix not in PACKED_ENDINGS else file.stem
        stream = cast(IO[bytes], UNPACKING[packed](raw))
        form = _format(stream, name, where=where)
        if form in UNPACKING or form is Format.parquet:
            raise ValueError(f"{where}: is {form.value}, which is not read from {packed.value}; decompress it first")
        yield stream, form, where


def _format(stream: IO[bytes], name: str, *, where: str) -> Format:
    """Return what a file is; a name that promises JSON Lines or Parquet is held to it."""
    head = stream.read(HEAD_BYTES)
    stream.seek(0)
    try:
        form = recognize(head)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    ending = Path(name).suffix.lower()
    if ending == ".parquet" and form in (Format.text, Format.json_lines):
        raise ValueError(f"{where}: is not Parquet, as its name says, but {form.value}; fetch it again, or rename it")
    if ending in NOT_PROSE and form is Format.text:
        raise ValueError(
            f"{where}: is {NOT_PROSE[ending]} by its name; write it as JSON Lines or Parquet, and set data.field, or "
            f"rename it if it is prose"
        )
    if ending in (".json", ".jsonl", ".ndjson") and form is Format.text:
        return Format.json_lines
    return form


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Say in one line why a file cannot be read."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            reason = " ".join((error.strerror or str(error)).split())
            raise ValueError(f"{where}: cannot be read ({reason}); check the path and its permissions") from None
        raise ValueError(f"{where}: is damaged or incomplete ({error}); fetch it again") from None


def _plain_parts(stream: IO[bytes], *, where: str) -> Iterator[str]:
    """Yield a text as it is decoded, with `\\n` for every line end, and without a byte-order mark before it."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    position = 0
    with _readable(where):
        for chunk in iter(lambda: stream.read(CHUNK_BYTES), b""):
            if (place := chunk.find(0)) >= 0:
                raise ValueError(
                    f"{where}: holds a NUL byte (byte {position + place}), as no text does: it is binary or damaged; "
                    f"name a text, or repair it"
                )
            position += len(chunk)
            yield _decoded(decoder, chunk, position, where=where)
        yield _decoded(decoder, b"", position, where=where)


def _decoded(decoder: io.IncrementalNewlineDecoder, chunk: bytes, position: int, *, where: str) -> str:
    """Decode the bytes that end at a position of the file; empty ones are the end."""
    try:
        return decoder.decode(chunk, final=not chunk)
    except UnicodeDecodeError as error:
        place = position - len(error.object) + error.start
        raise ValueError(
            f"{where}: is not UTF-8 (byte {place}); convert it, e.g. with `iconv -f LATIN1 -t UTF-8`"
        ) from None
