"""Both texts of a run: cut to the limit, refused where they are one, a field asked for only where there is one."""

import json
from pathlib import Path

import pytest

from rotexp.data.corpora import Corpus, builtin_corpus
from rotexp.data.options import DataConfig, DataSource
from rotexp.experiment.inputs import read_corpus

CALIBRATION, EVALUATION = "Text to train on.\n" * 30, "Held-out text.\n" * 20


def texts(folder: Path, **options: object) -> DataConfig:
    for name, text in (("calibration", CALIBRATION), ("evaluation", EVALUATION)):
        if not (folder / f"{name}.txt").exists():
            (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    named = {name: str(folder / f"{name}.txt") for name in ("calibration", "evaluation")}
    return DataConfig("text", DataSource.text, **named | options)  # type: ignore[arg-type]


def test_plain_texts_are_read_whole_by_default(tmp_path: Path) -> None:
    assert read_corpus(texts(tmp_path)) == (Corpus(CALIBRATION, EVALUATION), [])


def test_a_text_longer_than_the_limit_is_cut_and_named(tmp_path: Path) -> None:
    limit = len(EVALUATION)
    said = f"data.max_characters={limit}: data.calibration is longer, and no more of it is read; null reads all"
    expected = Corpus(CALIBRATION[:limit], EVALUATION)
    assert read_corpus(texts(tmp_path, max_characters=limit)) == (expected, [said])
    assert read_corpus(texts(tmp_path, max_characters=None)) == (Corpus(CALIBRATION, EVALUATION), [])


def test_the_limit_holds_for_every_source() -> None:
    corpus, said = read_corpus(DataConfig("builtin", DataSource.builtin, max_characters=1000))
    whole = builtin_corpus()
    assert corpus == Corpus(whole.calibration[:1000], whole.evaluation[:1000])
    assert len(said) == 2


def test_the_builtin_texts_are_shorter_than_the_default_limit() -> None:
    assert read_corpus(DataConfig("builtin", DataSource.builtin)) == (builtin_corpus(), [])


def test_one_text_may_be_rows_and_the_other_plain(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"body": line}) + "\n" for line in ("One.", "Two."))
    (tmp_path / "calibration.txt").write_text(rows, encoding="utf-8")
    assert read_corpus(texts(tmp_path, field="body"))[0] == Corpus("One.\n\nTwo.", EVALUATION)
    with pytest.raises(ValueError, match=r"^data.calibration=.*: is JSON Lines; set data.field to .*\(body\)$"):
        read_corpus(texts(tmp_path))


def test_a_field_of_plain_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.field=body: must be null where both texts are plain; leave it out$"):
        read_corpus(texts(tmp_path, field="body"))


def test_both_texts_are_looked_for_before_one_is_read(tmp_path: Path) -> None:
    options = texts(tmp_path, evaluation=str(tmp_path / "absent.txt"))
    (tmp_path / "calibration.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"^data.evaluation=.*absent.txt: no such file; "):
        read_corpus(options)


@pytest.mark.parametrize("limit", [None, 100])
def test_what_was_read_of_both_texts_must_differ(limit: int | None, tmp_path: Path) -> None:
    (tmp_path / "evaluation.txt").write_text(CALIBRATION.upper() + "and more" * (limit is not None), encoding="utf-8")
    with pytest.raises(ValueError, match=r"^data.evaluation=.*: holds the same text as data.calibration=.*, whatever"):
        read_corpus(texts(tmp_path, max_characters=limit))
