"""Recognize what a file is by its first bytes, whatever it is called."""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections import Counter
from enum import Enum

HEAD_BYTES = 1 << 16
"""How much of a file is looked at."""


class Format(Enum):
    """What text can be read from."""

    text = "plain text"
    json_lines = "JSON Lines"
    parquet = "Parquet"
    gzip = "gzip"
    bzip2 = "bzip2"
    xz = "xz"


PACKED = {
    Format.gzip: re.compile(rb"\x1f\x8b"),
    Format.bzip2: re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    Format.xz: re.compile(rb"\xfd7zXZ\x00|\x5d\x00\x00"),
}
"""First bytes of what is unpacked; the older form of xz is that of `.lzma`."""


UNPACK = "unpack it, and name the files inside"
CONVERT_ROWS = "write it as Parquet or JSON Lines, and set data.field"
SAVE_AS_TEXT = "save its text as UTF-8"

ZLIB = (b"x\x9c", b"x\xda", b"x\x01")
"""Its first bytes, by level of compression."""

FOREIGN = (
    (b"PK\x03\x04", "a zip archive (or a docx, xlsx, npz or torch file)", UNPACK),
    (b"PK\x05\x06", "an empty zip archive", UNPACK),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it with `zstd -d`"),
    (b"LZIP\x01", "compressed by lzip", "decompress it with `lzip -dk`"),
    *((start, "compressed by zlib", "decompress it with `zlib-flate -uncompress`") for start in ZLIB),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it with `lz4 -d`"),
    (b"\xff\x06\x00\x00sNaPpY", "compressed by snappy", "decompress it"),
    (b"\x1f\x9d", "compressed by compress", "decompress it with `gzip -dk`"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", UNPACK),
    (b"Rar!\x1a\x07", "a rar archive", UNPACK),
    (b"PARE", "encrypted Parquet", "decrypt it"),
    (b"ARROW1", "an Arrow file", CONVERT_ROWS),
    (b"\xff\xff\xff\xff", "an Arrow stream", CONVERT_ROWS),
    (b"ORC", "an ORC file", CONVERT_ROWS),
    (b"Obj\x01", "an Avro file", CONVERT_ROWS),
    (b"SQLite format 3\x00", "an SQLite database", CONVERT_ROWS),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", CONVERT_ROWS),
    (b"\x93NUMPY", "a NumPy array", "name the text, not its tokens"),
    (b"GGUF", "a model in GGUF", "name a text"),
    (b"%PDF-", "a PDF", SAVE_AS_TEXT),
    (b"{\\rtf", "an RTF document", SAVE_AS_TEXT),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Office document", SAVE_AS_TEXT),
    (b"\x7fELF", "a program", "name a text"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", "name a text"),
    (b"\xff\xd8\xff", "a JPEG picture", "name a text"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer", "fetch the file itself with `git lfs pull`"),
)
"""First bytes of what is often named by mistake, what it is, and what to do."""

SIGNS_OF_BINARY = {
    b"ORC": re.compile(rb"ORC[\x00-\x1f]"),
    b"GGUF": re.compile(rb"GGUF[\x01-\x0f]\x00"),
    b"ARROW1": re.compile(rb"ARROW1\x00\x00"),
}
"""More of the first bytes, where a text may well begin with so few letters."""

TAR_PLACE, TAR_MAGIC = 257, b"ustar"
PICKLE = re.compile(rb"\x80[\x02-\x05]|\([ld]p\d+\n|\(?[VSIF][^\n]*\np\d+\n|c[\w.]+\n\w+\np\d+\n")
"""Of protocol 0 too, which is ASCII."""

TO_UTF8 = "convert it with `iconv -f {encoding} -t UTF-8`"
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
WIDE = {"UTF-32LE": 4, "UTF-32BE": 4, "UTF-16LE": 2, "UTF-16BE": 2}
"""Bytes of a character."""

CONTROLS = bytes(byte for byte in [*range(1, 32), 127] if byte not in b"\b\t\n\v\f\r\x1a\x1b")
"""What hardly occurs in texts; form feeds, terminals' escapes, overstriking and DOS's end of a file do."""

LONGEST_WORD = 32
"""Characters of a number or word of JSON that the end of the head may cut off."""

FEW_CONTROLS = 0.05
CONTROLS_IN_WIDE = 0.005
CHARACTERS_A_LEAD = 4
DIFFERENCE_OF_PAIRS = 0.3
MOSTLY = 0.97
"""How texts in UTF-16 without a mark are known: shares of bytes, and of characters; and how few leading bytes are."""


def recognize(head: bytes) -> Format:
    """Return what a file is, of which these are the first bytes.

    Raises:
        ValueError: it is nothing that text is read from; says what it is, and what to do.
    """
    for form, magic_of_form in PACKED.items():
        if magic_of_form.match(head):
            return form
    if head.startswith(b"PAR1"):
        return Format.parquet
    for magic, name, remedy in FOREIGN:
        if head.startswith(magic) and (magic not in SIGNS_OF_BINARY or SIGNS_OF_BINARY[magic].match(head)):
            raise ValueError(f"is {name}, not text; {remedy}")
    if head[TAR_PLACE:].startswith(TAR_MAGIC):
        raise ValueError(f"is a tar archive, not text; {UNPACK}")
    if PICKLE.match(head):
        raise ValueError("is a pickle, not text; save its text as UTF-8")
    _refuse_wide_characters(head)
    return _text_format(head.removeprefix(codecs.BOM_UTF8))


def _refuse_wide_characters(head: bytes) -> None:
    """Refuse UTF-16 and UTF-32, and what is full of control characters."""
    for mark, name in BYTE_ORDER_MARKS:
        if head.startswith(mark):
            raise ValueError(f"is {name}, not UTF-8; {TO_UTF8.format(encoding=name)}")
    controls = sum(map(head.count, CONTROLS))
    if controls + head.count(0) > CONTROLS_IN_WIDE * len(head) and _has_pairs(head):
        likely = [name for name in WIDE if _is_text_in(head, name)]
        if likely:
            name = min(likely, key=lambda name: _leading_bytes(head, name))
            raise ValueError(f"looks like {name}, not UTF-8; {TO_UTF8.format(encoding=name)}")
    if controls > FEW_CONTROLS * len(head):
        raise ValueError(f"is binary (of its first {len(head)} bytes {controls} are control characters); name a text")


def _has_pairs(head: bytes) -> bool:
    """Whether bytes at even and at odd places are of different kinds, as never in encodings of one byte a letter."""
    even, odd = Counter(head[0::2]), Counter(head[1::2])
    return (even - odd).total() > DIFFERENCE_OF_PAIRS * even.total()


def _is_text_in(head: bytes, encoding: str) -> bool:
    """Whether nearly all characters are usual ones in an encoding, and of few scripts."""
    try:
        text = codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return False
    usual = sum(character in "\t\n\r\f" or unicodedata.category(character)[0] in "LMNPSZ" for character in text)
    return usual > MOSTLY * len(text) and CHARACTERS_A_LEAD * _leading_bytes(head, encoding) <= len(text)


def _leading_bytes(head: bytes, encoding: str) -> int:
    """How many different bytes lead the characters: few, as a text is of one script."""
    width = WIDE[encoding]
    return len(set(head[width - 1 if encoding.endswith("LE") else 0 :: width]))


def _text_format(head: bytes) -> Format:
    """Tell JSON Lines from other text; one JSON value over several lines is refused."""
    start = head.lstrip()
    if re.match(rb'\[\s*\{\s*["}]', start):
        raise ValueError("is one JSON array; write one object a line (`jq -c '.[]'`), and set data.field")
    if start.startswith(b"[") and _is_array(start.decode(errors="ignore"), cut_off=len(head) + 3 >= HEAD_BYTES):
        raise ValueError(
            "is a JSON array; write one object a line (`jq -c '.[] | {text: .}'`), and set data.field=text"
        )
    if not re.match(rb'\{\s*["}]', start):
        return Format.text
    lines = [line for line in start.split(b"\n") if line.strip()]
    complete = (lines if len(head) < HEAD_BYTES else lines[:-1])[:2]
    if any(map(_is_object, complete)):
        return Format.json_lines if all(line.lstrip().startswith(b"{") for line in complete) else Format.text
    if not complete:  # the first line is longer than the head
        return Format.json_lines
    if re.match(rb'\{\s*"[^"\n]*"\s*:', start):
        raise ValueError("is JSON, but not one object a line; write it so (`jq -c .`), and set data.field")
    return Format.text


def _is_array(start: str, *, cut_off: bool, lines: int = 2) -> bool:
    """Whether a text is a JSON array, or its first lines are one each, as far as is seen of it."""
    try:
        _array, end = json.JSONDecoder().raw_decode(start)
    except json.JSONDecodeError as error:
        return cut_off and (error.msg.startswith("Unterminated string") or error.pos + LONGEST_WORD >= len(start))
    except RecursionError:
        return True
    rest = start[end:].lstrip()
    if not rest:
        return True
    is_next_line = "\n" in start[end : len(start) - len(rest)]
    return is_next_line and (lines == 1 or (rest[0] == "[" and _is_array(rest, cut_off=cut_off, lines=lines - 1)))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
