"""The corpora: disjoint, stable, prose only; and a hub that does not answer is said in one line."""

import ast
import gc
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from rotexp.data import corpora
from rotexp.data.corpora import Corpus, builtin_corpus, cut_to, text_digest, wikitext2_corpus

DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture(scope="module")
def builtin() -> Corpus:
    return builtin_corpus()


@pytest.fixture
def stdlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up standard library, and no topics: what the corpus holds is known to the letter."""
    root = tmp_path / "stdlib"
    root.mkdir()
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(corpora, "_topic_documents", dict)
    return root


def both(corpus: Corpus) -> str:
    return corpus.calibration + corpus.evaluation


def test_builtin_holds_topics_and_docstrings_of_every_kind(builtin: Corpus) -> None:
    import json
    import pydoc_data.topics

    text = both(builtin)
    assert len(text) > 1_500_000
    assert pydoc_data.topics.topics["lambda"].strip().split("\n\n")[-1] in text
    for documented in (json, json.JSONEncoder, json.dumps):
        first_line = (documented.__doc__ or "").strip().splitlines()[0]
        assert first_line in text


def test_builtin_holds_out_about_a_tenth(builtin: Corpus) -> None:
    share = len(builtin.evaluation) / len(both(builtin))
    assert 0.06 < share < 0.14


def test_builtin_evaluation_repeats_no_long_paragraph_of_calibration(builtin: Corpus) -> None:
    calibration = set(builtin.calibration.split("\n\n"))
    evaluation = {paragraph for paragraph in builtin.evaluation.split("\n\n") if len(paragraph) >= 80}
    assert len(evaluation) > 300
    assert not evaluation & calibration


def test_builtin_is_the_same_in_another_process_with_another_hash_seed(builtin: Corpus) -> None:
    program = (
        "from rotexp.data.corpora import builtin_corpus, text_digest\n"
        "corpus = builtin_corpus()\n"
        "print(text_digest(corpus.calibration + corpus.evaluation))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == text_digest(both(builtin))


def test_importing_corpora_imports_neither_torch_nor_datasets() -> None:
    program = "import sys, rotexp.data.corpora; print(sorted({'torch', 'datasets'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_builtin_reads_module_class_and_function_docstrings_and_cleans_them(stdlib: Path) -> None:
    (stdlib / "module.py").write_text(
        '"""Of the module."""\n'
        "class Kind:\n"
        '    """Of the class.\n\n    Level.\n        Deeper.\n    """\n'
        "    async def method(self):\n"
        '        """Of the coroutine."""\n'
        '        "not a docstring"\n'
    )
    text = both(builtin_corpus())
    assert text.strip() == "Of the module.\n\nOf the class.\n\nLevel.\n    Deeper.\n\nOf the coroutine."


NESTED = """
'1'
def outer():
    '2'
    def inner():
        '3'
if True:
    def branch():
        '4'
else:
    class Other:
        '5'
        def method():
            '8'
try:
    with open('file') as file, open(lambda: 'no docstring'):
        for line in file:
            def innermost():
                '11'
except OSError:
    def handler():
        '9'
else:
    def without():
        '6'
finally:
    def last():
        '7'
match 1:
    case 1 if True:
        async def case():
            '10'
"""
"""Functions in every kind of statement that may hold some, numbered level by level."""


def test_builtin_reads_docstrings_in_the_order_of_the_syntax_tree(stdlib: Path) -> None:
    (stdlib / "module.py").write_text(NESTED)
    walked = [node for node in ast.walk(ast.parse(NESTED)) if isinstance(node, ast.Module | DEFINITIONS)]
    expected = [ast.get_docstring(node) for node in walked]
    assert expected == [str(1 + number) for number in range(11)]
    assert both(builtin_corpus()).split() == expected


def test_builtin_puts_the_collector_of_cycles_back(stdlib: Path) -> None:
    builtin_corpus()
    assert gc.isenabled()
    gc.disable()
    try:
        builtin_corpus()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_builtin_leaves_out_tests_vendored_packages_and_files_that_do_not_parse(stdlib: Path) -> None:
    for folder in ("test", "ctypes/test", "site-packages/torch", "idlelib", "lib2to3", "encodings"):
        (stdlib / folder).mkdir(parents=True)
        (stdlib / folder / "left_out.py").write_text('"""Left out."""')
    (stdlib / "syntax.py").write_text('"""Broken."""\ndef (:\n')
    (stdlib / "coding.py").write_bytes(b'"""Undecodable \xff."""')
    (stdlib / "null.py").write_bytes(b'"""Null."""\0')
    (stdlib / "folder.py").mkdir()
    (stdlib / "kept.py").write_text('"""Kept."""')
    assert both(builtin_corpus()).strip() == "Kept."


def test_builtin_drops_a_docstring_met_before(stdlib: Path) -> None:
    for name in ("first", "second"):
        (stdlib / f"{name}.py").write_text(f'"""Of {name}."""\ndef close():\n    """Close it."""\n')
    assert both(builtin_corpus()).count("Close it.") == 1


def test_builtin_splits_by_the_hash_of_the_document_name(stdlib: Path) -> None:
    for index in range(40):
        (stdlib / f"m{index}.py").write_text(f'"""Document {index}."""')
    corpus = builtin_corpus()
    for index in range(40):
        number = int.from_bytes(hashlib.sha256(f"module:m{index}".encode()).digest()[:8], "big")
        side, other = corpus.calibration.splitlines(), corpus.evaluation.splitlines()
        if number % 10 == 0:
            side, other = other, side
        assert f"Document {index}." in side
        assert f"Document {index}." not in other


def test_text_digest_is_the_start_of_sha256() -> None:
    assert text_digest("abc") == "ba7816bf8f01cfea"
    assert text_digest("naïve") == hashlib.sha256("naïve".encode()).hexdigest()[:16]


def test_a_corpus_is_cut_to_the_beginning_of_each_text_and_the_longer_ones_are_named() -> None:
    corpus = Corpus("abcdef", "xyz")
    assert cut_to(corpus, 3) == (Corpus("abc", "xyz"), ["data.calibration"])
    assert cut_to(corpus, 2) == (Corpus("ab", "xy"), ["data.calibration", "data.evaluation"])
    assert cut_to(corpus, 6) == (corpus, [])
    assert cut_to(corpus, None) == (corpus, [])


@pytest.fixture
def wikitext_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local dataset folder with the configuration and the splits of WikiText-2."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "wikitext"
    folder.mkdir()
    rows = {"train": ["", " = Title = \n", " Text to train on . \n"], "test": [" Held out . \n"], "validation": ["x"]}
    for split, texts in rows.items():
        datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / f"{split}.parquet")
    files = "".join(f"  - split: {split}\n    path: {split}.parquet\n" for split in rows)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n{files}---\n")
    return folder


def test_wikitext2_calibrates_on_train_and_evaluates_on_test(wikitext_folder: Path) -> None:
    corpus = wikitext2_corpus(path=str(wikitext_folder), revision=None)
    assert corpus.calibration == "\n\n = Title = \n\n\n Text to train on . \n"
    assert corpus.evaluation == " Held out . \n"


def assert_one_line_with_remedies(message: str) -> None:
    assert "\n" not in message
    assert "pip install 'rotexp[hub]'" in message
    assert "data=text data.calibration=FILE data.evaluation=FILE" in message


def test_wikitext2_without_the_datasets_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs `datasets`") as caught:
        wikitext2_corpus(path="Salesforce/wikitext", revision=None)
    assert_one_line_with_remedies(str(caught.value))


def test_wikitext2_names_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="cannot load WikiText-2") as caught:
        wikitext2_corpus(path=str(tmp_path / "absent"), revision="v1")
    assert_one_line_with_remedies(str(caught.value))
    assert f"data.path={tmp_path / 'absent'} (revision v1)" in str(caught.value)


def test_wikitext2_names_an_unreachable_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach the hub\nafter 5 tries")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match="ConnectionError: Couldn't reach the hub after 5 tries") as caught:
        wikitext2_corpus(path="Salesforce/wikitext", revision=None)
    assert_one_line_with_remedies(str(caught.value))
