"""What a file is, is known by its first bytes, and what is no text is refused by its name with a remedy."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import random
import sqlite3
import tarfile
import zipfile
import zlib
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
        (lambda: b"LZIP\x01\x0c", "compressed by lzip", "`lzip -dk`"),
        *((lambda level=level: zlib.compress(PROSE.encode(), level), "by zlib", "zlib-flate") for level in (1, 6, 9)),
        (lambda: b"\x28\xb5\x2f\xfd\x04\x00", "compressed by zstd", "`zstd -d`"),
        (lambda: pickle.dumps([PROSE]), "a pickle", "save its text as UTF-8"),
        (lambda: pickle.dumps([PROSE], protocol=0), "a pickle", "save its text as UTF-8"),
        (lambda: pickle.dumps({"text": PROSE}, protocol=0), "a pickle", "save its text as UTF-8"),
        (lambda: pickle.dumps(PROSE, protocol=0), "a pickle", "save its text as UTF-8"),
        (lambda: pickle.dumps((PROSE, 1), protocol=0), "a pickle", "save its text as UTF-8"),
        (lambda: pickle.dumps(np.arange(3), protocol=0), "a pickle", "save its text as UTF-8"),
        (
            lambda: bytes(random.Random(0).choices(range(1, 128), k=999)),
            "is binary (of its first 999 bytes",
            "name a text",
        ),
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
        (lambda: b'["a", "b"]', "is a JSON array", "{text: .}"),
        (lambda: b'[["a"]]', "is a JSON array", "{text: .}"),
        (lambda: b"[]", "is a JSON array", "{text: .}"),
        (lambda: json.dumps([PROSE] * 3, indent=2).encode(), "is a JSON array", "{text: .}"),
        (lambda: json.dumps([PROSE] * 3000).encode(), "is a JSON array", "{text: .}"),
        (lambda: json.dumps(list(range(99999))).encode(), "is a JSON array", "{text: .}"),
        (lambda: json.dumps(["long " * HEAD_BYTES]).encode(), "is a JSON array", "{text: .}"),
        (lambda: b'["a"]\n["b", "c"]\n', "is a JSON array", "{text: .}"),
        (lambda: b'["a"]\n' * HEAD_BYTES, "is a JSON array", "{text: .}"),
        (lambda: b"[" * HEAD_BYTES, "is a JSON array", "{text: .}"),
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
        '["Quoted in brackets"] begins a sentence.\n',
        "[1]\n[2] are footnotes.\n",
        "[1] [2]\n",
        '["unfinished',
        "Form feed\f, vertical tab\v, \x1b[1mbold\x1b[0m, over\bstrike, the end of a DOS file\x1a",
        "Incidentally (lp is no pickle.\n",
        "{ braces } are fine: {a, b}\n",
        '{"a": 1}\nprose that follows one line of JSON\n',
        '"Quoted," she said.\n',
    ],
)
def test_prose_that_begins_like_something_else_is_text(text: str) -> None:
    assert recognize(text.encode()) is Format.text


SCRIPTS = {
    "Russian": "Это обычный русский текст, в котором нет ничего особенного. ",
    "Russian without spaces": "Этообычныйрусскийтекст",
    "Greek": "Αυτό είναι ένα συνηθισμένο κείμενο. ",
    "Hebrew": "זהו טקסט רגיל לגמרי, בלי שום דבר מיוחד. ",
    "Arabic": "هذا نص عادي تماما، ليس فيه شيء خاص. ",
    "Hindi": "यह एक साधारण पाठ है, जिसमें कुछ विशेष नहीं है। ",
    "Thai": "นี่คือข้อความธรรมดาที่ไม่มีอะไรพิเศษ ",
    "Chinese": "这是一段普通的中文文本，没有什么特别的内容。我们用它来检查文件的编码是否被正确地识别出来。",
    "Japanese": "これは普通の文章であり、特別なものは何もありません。エンコーディングを調べるために使います。",
    "Korean": "이것은 특별한 것이 없는 평범한 글입니다. ",
    "English": "This is an ordinary text, without anything in it. ",
}


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_wide_characters_without_a_mark_are_known_in_every_script(text: str, encoding: str) -> None:
    for times in (20, 5000):
        with pytest.raises(ValueError, match=f"^looks like {encoding}, not UTF-8; .*`iconv -f {encoding} -t UTF-8`"):
            recognize((text * times).encode(encoding)[:HEAD_BYTES])
    assert recognize((text * 20).encode()) is Format.text


@pytest.mark.parametrize(
    ("language", "encoding"),
    [
        ("Russian", "cp1251"),
        ("Russian", "koi8-r"),
        ("Russian without spaces", "cp1251"),
        ("Greek", "cp1253"),
        ("Hebrew", "cp1255"),
        ("Arabic", "cp1256"),
        ("Thai", "tis-620"),
        ("Chinese", "gb18030"),
        ("Japanese", "shift-jis"),
        ("Japanese", "euc-jp"),
        ("Korean", "euc-kr"),
    ],
)
def test_other_encodings_are_not_taken_for_wide_ones(language: str, encoding: str) -> None:
    assert recognize((SCRIPTS[language] * 200).encode(encoding)) is Format.text  # reading it says that it is no UTF-8


def test_latin_1_is_not_taken_for_a_wide_encoding() -> None:
    assert recognize(("Un été à la campagne, où l'on dîne tôt; " * 300).encode("latin-1")) is Format.text


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


def test_what_is_unpacked_and_parquet_are_known() -> None:
    assert recognize(lzma.compress(PROSE.encode())) is Format.xz
    assert recognize(lzma.compress(PROSE.encode(), format=lzma.FORMAT_ALONE)) is Format.xz
    assert recognize(bz2.compress(PROSE.encode())) is recognize(bz2.compress(b"")) is Format.bzip2
    assert recognize(gzip.compress(b"text")) is Format.gzip
    assert recognize(b"PAR1\x15\x04") is Format.parquet
