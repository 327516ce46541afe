"""What a file is, is known by its first bytes, and what is no text is refused by its name with a remedy."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rotexp.data.formats import HEAD_BYTES, Format, recognize

PROSE = "Ein Text,\nder weitergeht: 世界.\n" * 40
ROW = json.dumps({"id": 1, "text": "Some text."})


def zipped() -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("a.txt", PROSE)
    return archive.getvalue()


def tarred() -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    return archive.getvalue()


def an_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(9))
    return file.getvalue()


def arrow(*, stream: bool) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    table, sink = pyarrow.table({"text": ["a"]}), io.BytesIO()
    open_writer = pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file
    with open_writer(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def test_a_database_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "texts.txt") as database:
        database.execute("create table texts (text)")
    database.close()
    with pytest.raises(ValueError, match="is an SQLite database, not text; write it as Parquet"):
        recognize((tmp_path / "texts.txt").read_bytes())


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (zipped, "a zip archive", "unpack it"),
        (tarred, "a tar archive", "unpack it"),
        (lambda: lzma.compress(PROSE.encode()), "compressed by xz", "`xz -dk`"),
        (lambda: bz2.compress(PROSE.encode()), "compressed by bzip2", "`bzip2 -dk`"),
        (lambda: bz2.compress(b""), "compressed by bzip2", "`bzip2 -dk`"),
        (lambda: b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd", "`zstd -d`"),
        (lambda: pickle.dumps([PROSE]), "a pickle", "save its text as UTF-8"),
        (an_array, "a NumPy array", "name the text, not its tokens"),
        (lambda: arrow(stream=True), "an Arrow stream", "write it as Parquet or JSON Lines"),
        (lambda: arrow(stream=False), "an Arrow file", "write it as Parquet or JSON Lines"),
        (lambda: b"%PDF-1.7\n%\xe2\xe3", "a PDF", "save its text as UTF-8"),
        (lambda: b"GGUF\x03\x00\x00\x00", "a model in GGUF", "name a text"),
        (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer", "`git lfs pull`"),
        (lambda: PROSE.encode("utf-16"), "UTF-16, not UTF-8", "`iconv -f UTF-16 -t UTF-8`"),
        (lambda: b"\xfe\xff" + PROSE.encode("utf-16-be"), "UTF-16, not UTF-8", "`iconv -f UTF-16 -t UTF-8`"),
        (lambda: PROSE.encode("utf-32"), "UTF-32, not UTF-8", "`iconv -f UTF-32 -t UTF-8`"),
        (lambda: PROSE.encode("utf-16-le"), "UTF-16LE, not UTF-8", "`iconv -f UTF-16LE -t UTF-8`"),
        (lambda: PROSE.encode("utf-16-be"), "UTF-16BE, not UTF-8", "`iconv -f UTF-16BE -t UTF-8`"),
        (lambda: b'[{"text": "a"}, {"text": "b"}]', "is one JSON array", "`jq -c '.[]'`"),
        (lambda: b'[\n  {"text": "a"}\n]', "is one JSON array", "`jq -c '.[]'`"),
        (lambda: json.dumps({"text": PROSE, "id": 1}, indent=2).encode(), "is JSON, but not one object", "`jq -c .`"),
    ],
)
def test_what_is_no_text_is_named_with_what_to_do(make: Callable[[], bytes], name: str, remedy: str) -> None:
    with pytest.raises(ValueError, match="; ") as caught:
        recognize(make()[:HEAD_BYTES])
    message = str(caught.value)
    assert name in message
    assert remedy in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "",
        "\ufeffA byte-order mark first.",
        "BZh is no abbreviation.",
        "ORCs and GGUFs and ARROW1 are written about.",
        "[{x}] is no array,\n[1] nor is a footnote",
        "{ braces } are fine: {a, b}\n",
        '{"a": 1}\nprose that follows one line of JSON\n',
        '"Quoted," she said.\n',
    ],
)
def test_prose_that_begins_like_something_else_is_text(text: str) -> None:
    assert recognize(text.encode()) is Format.text


@pytest.mark.parametrize(
    "head",
    [
        ROW,
        f"{ROW}\n{ROW}\n",
        f"\n\n  {ROW}\r\n{ROW}\r\n",
        f"\ufeff{ROW}\n",
        f"{ROW[:-3]}\n{ROW}\n",
        f"{ROW}\n{ROW[:-3]}\n",
        '{}\n{"text": ""}\n',
        '{"text": "' + "long " * HEAD_BYTES,
    ],
    ids=["one", "two", "blank lines", "mark", "first damaged", "second damaged", "empty", "longer than the head"],
)
def test_json_lines_are_known_whatever_their_name(head: str) -> None:
    assert recognize(head.encode()[:HEAD_BYTES]) is Format.json_lines


def test_gzip_and_parquet_are_known() -> None:
    assert recognize(gzip.compress(b"text")) is Format.gzip
    assert recognize(b"PAR1\x15\x04") is Format.parquet
