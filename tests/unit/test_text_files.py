"""The user's texts: plain, gzipped or one field of rows; of files, folders and patterns; damage said in one line."""

import bz2
import gzip
import json
import lzma
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import pytest

from rotexp.data import text_files
from rotexp.data.text_files import find_text

KEY = "data.evaluation"
DOCUMENTS = ["The first document.\nIt has two lines.", "", "Grüße, 世界 🙂", "The last."]
JOINED = "\n\n".join(DOCUMENTS)


def read(path: Path, *, field: str | None = None, at_most: int | None = None) -> str:
    return find_text(path, key=KEY).read(field=field, at_most=at_most)


def refusal(path: Path, *, field: str | None = None) -> str:
    """The one line that refuses a text, behind the key and what was named."""
    with pytest.raises(ValueError, match=re.escape(f"{KEY}={path}")) as caught:
        read(path, field=field)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{KEY}={path}")
    return message.removeprefix(f"{KEY}={path}")


def lines(documents: Iterable[object], *, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 0, field: document}).encode() + b"\n" for document in documents)


def write_parquet(file: Path, documents: Iterable[object], *, field: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    values = list(documents)
    write_table(pyarrow.table({"id": list(range(len(values))), field: values}), file, row_group_size=2)


def test_plain_text_is_read_as_it_is_with_one_kind_of_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "prose"
    file.write_bytes("\ufeffGrüße,\r\n\t世界 🙂\rEnd \r\n".encode())
    assert read(file) == file.read_text(encoding="utf-8-sig") == "Grüße,\n\t世界 🙂\nEnd \n"


@pytest.mark.parametrize("size", [1, 2, 3, 1 << 20])
def test_a_byte_order_mark_is_left_out_at_the_beginning_of_every_file(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", size)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name}\ufeff", encoding="utf-8-sig")
    assert read(tmp_path) == "a.txt\ufeff\n\nb.txt\ufeff"
    (tmp_path / "c.txt").write_bytes(b"\xef\xbb\xbfcaf\xe9!")
    assert refusal(tmp_path / "c.txt").startswith(": is not UTF-8 (byte 6)")


def test_characters_and_line_ends_across_chunks_are_read_as_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prose.txt"
    file.write_bytes("a\r\nü世\r\n🙂\r".encode() * 7)
    for size in (1, 2, 3, 5):
        monkeypatch.setattr(text_files, "CHUNK_BYTES", size)
        assert read(file) == "a\nü世\n🙂\n" * 7


@pytest.mark.parametrize("name", ["texts.jsonl", "texts", "texts.txt"])
def test_a_field_of_json_lines_is_joined_by_blank_lines(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + lines(DOCUMENTS).replace(b"\n", b"\r\n\n"))
    assert read(file, field="text") == JOINED


def test_a_column_of_parquet_is_joined_by_blank_lines(tmp_path: Path) -> None:
    write_parquet(tmp_path / "texts", DOCUMENTS)
    assert read(tmp_path / "texts", field="text") == JOINED


def test_gzip_is_unpacked_whatever_its_name(tmp_path: Path) -> None:
    for name, content in (("a.txt.gz", JOINED.encode()), ("b.jsonl.gz", lines(DOCUMENTS)), ("c", lines(DOCUMENTS))):
        (tmp_path / name).write_bytes(gzip.compress(content[:30]) + gzip.compress(content[30:]))
        assert read(tmp_path / name, field=None if name == "a.txt.gz" else "text") == JOINED
    (tmp_path / "unpacked.txt.gz").write_bytes(b"A browser unpacked this on the way.")
    assert read(tmp_path / "unpacked.txt.gz") == "A browser unpacked this on the way."


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE),
}


@pytest.mark.parametrize(("ending", "pack"), PACKERS.items(), ids=PACKERS.keys())
def test_what_python_unpacks_is_read(ending: str, pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / f"a.jsonl{ending}").write_bytes(pack(lines(DOCUMENTS)))
    assert read(tmp_path / f"a.jsonl{ending}", field="text") == JOINED
    (tmp_path / "b").write_bytes(pack(JOINED.encode() * 2000))
    assert read(tmp_path / "b") == JOINED * 2000
    (tmp_path / "b").write_bytes(pack(os.urandom(60_000).hex().encode())[:-9000])
    assert ": is damaged or incomplete (" in refusal(tmp_path / "b")
    (tmp_path / f"c.jsonl{ending}").write_bytes(pack(b"No JSON."))
    assert ":1: is no JSON object" in refusal(tmp_path / f"c.jsonl{ending}", field="text")
    (tmp_path / f"d.txt{ending}").write_bytes(b"")
    assert f": is a folder of several kinds of files (.jsonl{ending}, .txt{ending}, no ending)" in refusal(tmp_path)


def test_plain_text_and_json_lines_need_no_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS)))
    assert read(tmp_path / "*.gz", field="text") == JOINED
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    install = ": is Parquet, which needs pyarrow: `pip install 'rotexp[hub]'`"
    assert refusal(tmp_path / "b.parquet", field="text") == refusal(tmp_path / "b.parquet") == install


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.txt", "a/10.txt", "c.txt", ".hidden.txt", ".git/d.txt", "a/.cache/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == "a/10.txt\n\na/2.txt\n\nb.txt\n\nc.txt"
    assert read(tmp_path / "a") == "a/10.txt\n\na/2.txt"


def test_a_pattern_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "README.md", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == "b.txt"
    assert read(tmp_path / "**" / "*.txt") == "a/c.txt\n\nb.txt"
    assert read(tmp_path / "**") == "README.md\n\na/c.txt\n\nb.txt"
    assert read(tmp_path / "[bc].*") == "b.txt"


def test_a_file_that_is_called_like_a_pattern_is_itself(tmp_path: Path) -> None:
    (tmp_path / "[a]*.txt").write_text("itself")
    (tmp_path / "a1.txt").write_text("another")
    assert read(tmp_path / "[a]*.txt") == "itself"


def test_files_of_rows_are_joined_as_if_they_were_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(DOCUMENTS[:1]))
    (tmp_path / "b.jsonl").write_bytes(b"\n")
    (tmp_path / "c.jsonl").write_bytes(lines(DOCUMENTS[1:]))
    assert read(tmp_path, field="text") == JOINED
    write_parquet(tmp_path / "c.parquet", DOCUMENTS[1:])
    assert read(tmp_path / "[a]*.jsonl", field="text") == DOCUMENTS[0]
    (tmp_path / "c.jsonl").unlink()
    assert read(tmp_path / "*", field="text") == JOINED


def test_a_link_has_the_content_of_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123abcd").write_bytes(lines(DOCUMENTS))
    (tmp_path / "texts.jsonl").symlink_to(tmp_path / "blobs" / "0123abcd")
    assert read(tmp_path / "texts.jsonl", field="text") == JOINED
    assert ": is JSON Lines; set data.field" in refusal(tmp_path / "texts.jsonl")


@pytest.mark.parametrize("packed", [False, True])
def test_no_more_is_read_than_is_asked_for(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies behind the wanted characters is damaged, so that reading it would be refused."""
    rows, pack = lines(DOCUMENTS), gzip.compress if packed else bytes
    (tmp_path / "a.jsonl").write_bytes(pack(rows + b"{damaged"))
    assert read(tmp_path / "a.jsonl", field="text", at_most=len(JOINED) - 1) == JOINED[:-1]
    assert read(tmp_path / "a.jsonl", field="text", at_most=len(JOINED)) == JOINED
    with pytest.raises(ValueError, match=r"a\.jsonl.*:5: is no JSON object"):
        read(tmp_path / "a.jsonl", field="text", at_most=len(JOINED) + 1)
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 8)
    monkeypatch.setattr(text_files, "HEAD_BYTES", 8)
    (tmp_path / "b.txt").write_bytes(pack(b"0123456789abcdef" + b"\xff" * 8))
    assert read(tmp_path / "b.txt", at_most=16) == "0123456789abcdef"
    with pytest.raises(ValueError, match=r"is not UTF-8 \(byte 16\)"):
        read(tmp_path / "b.txt", at_most=17)


def test_parquet_is_read_no_further_than_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "a.parquet", [*DOCUMENTS, None])
    monkeypatch.setattr("rotexp.data.rows.ROWS_AT_ONCE", 2)
    assert read(tmp_path / "a.parquet", field="text", at_most=len(JOINED)) == JOINED
    assert ", row 5: data.field=text: holds null, not text" in refusal(tmp_path / "a.parquet", field="text")


def test_rows_without_a_field_to_read_are_refused_with_those_they_have(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_bytes(b"\n" + lines(DOCUMENTS))
    expected = ": is JSON Lines; set data.field to the one that holds the text (id, text)"
    assert refusal(file) == expected
    packed = file.with_suffix(".gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert refusal(packed) == f" (unpacked){expected}"
    write_parquet(file, DOCUMENTS)
    assert refusal(file) == expected.replace("JSON Lines", "Parquet")


LONG = json.dumps({f"field{number}": number for number in range(20)}).encode()
DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"id": 1}', "data.field=text: is not among its fields (id); name another"),
        (b"{}", "data.field=text: is not among its fields (it has none); name another"),
        (LONG, "field9, field10, field11, …); name another"),
        (b'{"text": null}', "data.field=text: holds null, not text; "),
        (b'{"text": 7}', "data.field=text: holds a int, not text; "),
        (b'{"text": [{"role": "user"}]}', "data.field=text: holds a list, not text; "),
        (b'{"text": "a\\u0000b"}', "data.field=text: holds a NUL, as no text does; "),
        (b'{"text": "a\\ud800b"}', "data.field=text: holds half a surrogate pair (character 1); "),
        (b'{"text": "a', "is no JSON object (Unterminated string starting at, column 10); "),
        (b'"text"', "is no JSON object (but a str); "),
        (b"A text.", "is no JSON object (Expecting value, column 1); "),
        (b'{"text": "caf\xe9"}', "is not UTF-8 (byte 13 of the line); "),
        (b'{"text": ' + b"9" * 5000 + b"}", "is no JSON object (Exceeds the limit"),
        (DEEP, "is no JSON object (maximum recursion depth exceeded"),
    ],
    ids=range(14),
)
def test_a_damaged_line_is_named_by_its_number(line: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_bytes(lines(["A good line."]) + b"\n" + line + b"\n")
    refused = refusal(file, field="text")
    assert refused.startswith(":3: ")
    assert message in refused


def test_a_name_that_promises_rows_is_held_to_it(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.ndjson", "a.JSONL"):
        (tmp_path / name).write_text("No JSON.")
        assert refusal(tmp_path / name, field="text").startswith(":1: is no JSON object (Expecting value, column 1)")
    for name, kind in (("a.csv", "table"), ("a.TSV", "table"), ("a.pkl", "pickle")):
        (tmp_path / name).write_text("id,text\n1,Prose.\n")
        line = f": is a {kind} by its name; write it as JSON Lines or Parquet, and set data.field, or rename it"
        assert refusal(tmp_path / name).startswith(line)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"id,text\n1,Prose.\n"))
    assert refusal(tmp_path / "a.csv.gz").startswith(" (unpacked): is a table by its name; ")
    (tmp_path / "a.json").write_text('"One value."')
    assert refusal(tmp_path / "a.json", field="text") == ":1: is no JSON object (but a str); correct it or leave it out"
    (tmp_path / "a.json").write_bytes(lines(DOCUMENTS))
    assert read(tmp_path / "a.json", field="text") == JOINED
    (tmp_path / "a.parquet").write_text("<html>Not found</html>")
    assert refusal(tmp_path / "a.parquet").startswith(": is not Parquet, as its name says, but plain text; fetch it")


def test_a_column_that_holds_no_text_or_is_not_there_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    for value, kind in (([b"raw"], "bytes"), ([["a", "b"]], "list"), ([7], "int")):
        write_parquet(file, value)
        assert refusal(file, field="text").startswith(f", row 1: data.field=text: holds a {kind}, not text; ")
    assert refusal(file, field="body") == ": data.field=body: is not among its columns (id, text); name another"


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    write_parquet(file, DOCUMENTS)
    whole = file.read_bytes()
    for part in (whole[:-20], whole[:8]):
        file.write_bytes(part)
        assert refusal(file, field="text").startswith(": cannot be read as Parquet (")
        assert refusal(file).startswith(": cannot be read as Parquet (")


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    file, whole = tmp_path / "a.txt.gz", gzip.compress(os.urandom(40).hex().encode() * 3000)
    for damaged in (whole[:-9], whole[:12], whole[:40] + b"\xff" * 40 + whole[80:], whole + b"rubbish"):
        file.write_bytes(damaged)
        assert ": is damaged or incomplete (" in refusal(file)
    file.write_bytes(gzip.compress(whole))
    assert refusal(file) == " (unpacked): is gzip, which is not read from gzip; decompress it first"
    file.write_bytes(gzip.compress(b"PK\x03\x04"))
    assert refusal(file).startswith(" (unpacked): is a zip archive")


def make_missing(file: Path) -> None:
    pass


def make_below_a_file(file: Path) -> None:
    file.parent.rmdir()
    file.parent.write_text("a file where a folder should be")


def make_dangling(file: Path) -> None:
    file.symlink_to("/nowhere/blob")


def make_loop(file: Path) -> None:
    file.symlink_to(file)


def make_socket(file: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(file))  # a socket's path may be no longer than 108 bytes


def make_long_nul(file: Path) -> None:
    file.write_bytes(b"text " * 400_000 + b"\0\0")


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (make_missing, "no such file; give the path of an existing UTF-8 text file"),
        (Path.mkdir, "is a folder without files; name one that holds texts"),
        (make_below_a_file, "cannot be read (Not a directory); check the path"),
        (make_dangling, "is a link to /nowhere/blob, which is missing; fetch it again"),
        (make_loop, "cannot be read (Too many levels of symbolic links); check the path"),
        (os.mkfifo, "is a pipe, which a resumed or repeated run could not read again; write the text to a file"),
        (make_socket, "is a socket, which a resumed or repeated run could not read again"),
        (lambda file: file.write_bytes("café".encode("latin-1")), "is not UTF-8 (byte 3); convert it"),
        (lambda file: file.write_bytes(b"a text" + "世".encode()[:2]), "is not UTF-8 (byte 6); convert it"),
        (lambda file: file.write_bytes(b"one\0two"), "holds a NUL byte (byte 3), as no text does"),
        (make_long_nul, "holds a NUL byte (byte 2000000), as no text does"),
        (lambda file: file.write_bytes("text".encode("utf-16")), "is UTF-16, not UTF-8; convert it"),
        (Path.touch, "is empty; give a file that contains text"),
        (lambda file: file.write_text(" \n\t\n"), "is empty; give a file that contains text"),
        (lambda file: file.write_bytes(gzip.compress(b"")), "is empty; give a file that contains text"),
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(
    make: Callable[[Path], None], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "folder" / "prose.txt"
    file.parent.mkdir()
    monkeypatch.chdir(tmp_path)
    make(file)
    assert remedy in refusal(file)


def test_a_refused_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str) -> IO[bytes]:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / "prose.txt").write_text("text")
    monkeypatch.setattr(Path, "open", refuse)  # the tests may run as root, whom no mode bits stop
    assert refusal(tmp_path / "prose.txt") == ": cannot be read (Permission denied); check the path and its permissions"


def test_a_file_within_what_was_named_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    assert refusal(tmp_path).startswith(f": {tmp_path}/b.txt: is not UTF-8 (byte 3)")
    (tmp_path / "b.txt").unlink()
    os.mkfifo(tmp_path / "b.txt")
    assert refusal(tmp_path / "*.txt").startswith(f": {tmp_path}/b.txt: is a pipe, ")


def test_a_folder_of_several_kinds_asks_for_a_pattern(tmp_path: Path) -> None:
    for name in ("README.md", "texts.txt.gz", "LICENSE"):
        (tmp_path / name).write_text("text")
    kinds = ": is a folder of several kinds of files (.md, .txt.gz, no ending); name those that are meant by a pattern"
    assert refusal(tmp_path).startswith(kinds)


def test_plain_text_among_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(lines(DOCUMENTS))
    (tmp_path / "b.txt").write_text("Plain.")
    expected = f": {tmp_path}/b.txt: is plain text, and {tmp_path}/a.txt is not; name files of one kind, by a pattern"
    assert refusal(tmp_path, field="text") == expected
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    assert f"{tmp_path}/c.txt: is JSON Lines, and {tmp_path}/b.txt is not" in refusal(tmp_path, field="text")


def test_a_pattern_that_matches_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.d").mkdir()
    (tmp_path / ".b").write_text("hidden")
    assert refusal(tmp_path / "*").startswith(": no file matches; correct the pattern")


@pytest.mark.parametrize("address", ["https://example.com/a.txt", "hf://datasets/a", "s3://bucket/a.jsonl"])
def test_an_address_is_refused_as_such(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal(Path(address).absolute()).startswith(": is an address; download the file")


@pytest.mark.parametrize("command", ["{} <(cat a.txt)", "{} /dev/stdin < a.txt", "cat a.txt | {} /dev/stdin"])
def test_what_the_shell_opens_for_this_command_alone_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.")
    program = (
        "import sys, pathlib; from rotexp.data.text_files import find_text; "
        "find_text(pathlib.Path(sys.argv[1]), key='data.calibration')"
    )
    line = command.format(f'"{sys.executable}" -c "{program}"')
    run = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert ": is a pipe or file of this command alone, which a resumed or repeated run could not read" in run.stderr


def test_a_device_is_refused() -> None:
    assert refusal(Path("/dev/null")).startswith(": is a device, which a resumed or repeated run could not read again")


def test_reading_texts_imports_neither_torch_nor_datasets() -> None:
    program = "import sys, rotexp.data.text_files; print(sorted({'torch', 'datasets', 'pyarrow'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
