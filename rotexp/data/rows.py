"""Texts that are one field of every row: of JSON Lines, or of Parquet.

The `datasets` library, which is optional, is not used for them: it writes the rows to a cache on disk first, and its
errors name no line. For Parquet, pyarrow is enough, which comes with it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

from rotexp.data.formats import Format
from rotexp.errors.library import refused

ROWS_AT_ONCE = 1024
SHOWN_FIELDS = 12


def values(stream: IO[bytes], form: Format, field: str, *, where: str) -> Iterator[str]:
    """Yield one field of every row: of Parquet, or of what must be JSON Lines.

    Args:
        where: the key and file, for errors, which add the line or row.

    Raises:
        ValueError: a row is damaged, has no such field, or holds something else than text in it.
    """
    rows = _parquet_values if form is Format.parquet else _json_values
    for place, value in rows(stream, field, where=where):
        yield _checked(value, field, place)


def fields_of(stream: IO[bytes], form: Format, *, where: str) -> str:
    """Return the names of the first row's fields, for an error."""
    if form is Format.parquet:
        return _shown(_open_parquet(stream, where=where).schema_arrow.names)
    first = next((line for line in stream if line.strip()), b"{}")
    return _shown(_parsed(first.removeprefix(codecs.BOM_UTF8), where))


def _shown(fields: Iterable[str]) -> str:
    names = [name[:40] for name in fields]
    return (", ".join(names[:SHOWN_FIELDS]) + ", …" * (len(names) > SHOWN_FIELDS)) or "it has none"


def _checked(value: object, field: str, place: str) -> str:
    """Return a document that is text, and such that it can be encoded and tokenized."""
    where = f"{place}: data.field={field}"
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{where}: holds {kind}, not text; name a field of texts, or leave out that row")
    if "\x00" in value:
        raise ValueError(f"{where}: holds a NUL, as no text does; remove it")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: holds half a surrogate pair (character {error.start}); repair it") from None
    return value


def _json_values(stream: IO[bytes], field: str, *, where: str) -> Iterator[tuple[str, object]]:
    """Yield place and value of one field of every line that is not blank."""
    for number, line in enumerate(stream, start=1):
        if line.strip():
            place = f"{where}:{number}"
            row = _parsed(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, place)
            if field not in row:
                raise ValueError(f"{place}: data.field={field}: is not among its fields ({_shown(row)}); name another")
            yield place, row[field]


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    """Return the object of a line."""
    try:
        row = json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise ValueError(f"{place}: is not UTF-8 (byte {error.start} of the line); convert the file") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, column {error.colno}"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    else:
        if isinstance(row, dict):
            return row
        reason = f"but a {type(row).__name__}"
    raise ValueError(f"{place}: is no JSON object ({reason}); correct it or leave it out")


def _parquet_values(stream: IO[bytes], field: str, *, where: str) -> Iterator[tuple[str, object]]:
    """Yield place and value of one column, some rows at a time."""
    file = _open_parquet(stream, where=where)
    columns = file.schema_arrow.names
    if field not in columns:
        raise ValueError(f"{where}: data.field={field}: is not among its columns ({_shown(columns)}); name another")
    number = 0
    with _readable_parquet(where):
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield f"{where}, row {number}", value


def _open_parquet(stream: IO[bytes], *, where: str) -> Any:
    """Open a Parquet file, of which nothing but its description is read.

    Raises:
        ValueError: it is damaged, or pyarrow is not installed.
    """
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{where}: is Parquet, which needs pyarrow: `pip install 'rotexp[hub]'`") from None
    with _readable_parquet(where):
        return ParquetFile(stream)


@contextmanager
def _readable_parquet(where: str) -> Iterator[None]:
    with refused(lambda reason: f"{where}: cannot be read as Parquet ({reason}); fetch it again"):
        yield
