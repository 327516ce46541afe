"""A run's two texts, and where they come from if not from the user's files: CPython's own prose, or WikiText-2."""

import ast
import gc
import hashlib
import importlib
import inspect
import os
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rotexp.data.overlap import spelling_digest
from rotexp.errors.library import refused

# Tests and vendored or generated code: their docstrings are labels, tables or copies rather than prose.
EXCLUDED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
# One document in ten is held out.
EVALUATION_SHARE = 10
# Shorter repeated paragraphs ("Example:", "pass") belong to the flow of the text around them.
REPEATED_PARAGRAPH_LENGTH = 80
# Of a digest, in hexadecimal.
DIGITS = 16
# What may hold a statement.
_BRANCHES = (ast.stmt, ast.excepthandler, ast.match_case)


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts: `calibration` is trained on, `evaluation` only measured on."""

    calibration: str
    evaluation: str

    @cached_property
    def calibration_spelling(self) -> str:
        """The digest of the calibration text however it is written."""
        return spelling_digest(self.calibration)[:DIGITS]

    @cached_property
    def evaluation_spelling(self) -> str:
        """The digest of the evaluation text however it is written."""
        return spelling_digest(self.evaluation)[:DIGITS]


def text_digest(text: str) -> str:
    """The first 16 hexadecimal digits of the text's SHA-256, by which a reported figure names its text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:DIGITS]


def cut_to(corpus: Corpus, max_characters: int | None) -> tuple[Corpus, list[str]]:
    """Leave at most so many characters of each text (None: all); return the texts' keys that were longer."""
    texts = {name: getattr(corpus, name) for name in ("calibration", "evaluation")}
    longer = [
        f"data.{name}" for name, text in texts.items() if max_characters is not None and len(text) > max_characters
    ]
    if not longer:
        return corpus, []
    return Corpus(**{name: text[:max_characters] for name, text in texts.items()}), longer


def builtin_corpus() -> Corpus:
    """English technical prose that CPython carries: `pydoc_data.topics` and the standard library's docstrings.

    One topic or one module is one document. The hash of its name decides its side, so documents keep their side across
    Python versions. Paragraphs already seen, calibration first, are dropped: evaluation repeats none of calibration.
    """
    documents = {**_topic_documents(), **_module_documents()}
    calibration = {name: text for name, text in documents.items() if not _is_held_out(name)}
    evaluation = {name: text for name, text in documents.items() if _is_held_out(name)}
    seen: set[str] = set()
    return Corpus(
        calibration=_join_unseen(calibration.values(), seen=seen),
        evaluation=_join_unseen(evaluation.values(), seen=seen),
    )


def wikitext2_corpus(*, path: str, revision: str | None) -> Corpus:
    """WikiText-2 (raw): the train split to calibrate on, the test split to evaluate on.

    Rows are joined by a blank line, as in the published GPTQ and SpinQuant evaluations; figures compare with those at
    `evaluation.window=2048 evaluation.max_windows=null`.

    Args:
        path: a dataset's name on the hub, or a local folder that holds the configuration `wikitext-2-raw-v1`.
        revision: branch, tag or commit of the hub's repository; None takes its default branch.

    Raises:
        ValueError: the `datasets` library is not installed, or the dataset cannot be fetched or read.
    """
    remedy = "or use your own files with `data=text data.calibration=FILE data.evaluation=FILE`"
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"data=wikitext2 needs `datasets`: `pip install 'rotexp[hub]'`, {remedy}") from None
    line = f"data.path={path} (revision {revision}): cannot load WikiText-2"
    advice = f"check the path and the network, install `pip install 'rotexp[hub]'`, {remedy}"
    with refused(lambda reason: f"{line} ({reason}); {advice}"):
        splits = load_dataset(path, "wikitext-2-raw-v1", revision=revision)
        calibration, evaluation = ("\n\n".join(splits[split]["text"]) for split in ("train", "test"))
    return Corpus(calibration=calibration, evaluation=evaluation)


def _topic_documents() -> dict[str, str]:
    """The language reference behind `help()`, by topic."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return {f"topic:{name}": inspect.cleandoc(topics[name]) for name in sorted(topics)}


def _module_documents() -> dict[str, str]:
    """The docstrings of each standard-library module, by dotted module name; an exact repetition is dropped."""
    root = Path(sysconfig.get_path("stdlib"))
    documents: dict[str, str] = {}
    seen: set[str] = set()
    with _without_collector():
        for file in _source_files(root):
            docstrings = [text for text in dict.fromkeys(_docstrings(file)) if text not in seen]
            seen.update(docstrings)
            documents[f"module:{'.'.join(file.relative_to(root).with_suffix('').parts)}"] = "\n\n".join(docstrings)
    return {name: text for name, text in documents.items() if text}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the collector of cycles: syntax trees have none, and it would go through all of torch for each of them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _source_files(root: Path) -> list[Path]:
    """The Python files below a folder, sorted, but for those in excluded folders."""
    found = []
    for folder, inside, files in os.walk(root):
        inside[:] = set(inside) - EXCLUDED_FOLDERS  # by which os.walk leaves them out
        found += [Path(folder, file) for file in files if file.endswith(".py")]
    return sorted(found)


def _docstrings(file: Path) -> Iterator[str]:
    """The cleaned docstrings of a source file: module, classes and functions; none if it cannot be read or parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _statements(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=True)
            if docstring:
                yield docstring


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and its statements in the order of `ast.walk`, without their expressions, which hold no docstrings."""
    level = [tree]
    while level:
        yield from level
        level = [child for node in level for child in ast.iter_child_nodes(node) if isinstance(child, _BRANCHES)]


def _is_held_out(name: str) -> bool:
    """Whether the document of this name belongs to the evaluation split."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big") % EVALUATION_SHARE == 0


def _join_unseen(documents: Iterable[str], *, seen: set[str]) -> str:
    """The documents as one text, without the long paragraphs in `seen`, to which the new ones are added."""
    kept: list[str] = []
    for document in documents:
        for paragraph in document.split("\n\n"):
            if len(paragraph) < REPEATED_PARAGRAPH_LENGTH or paragraph not in seen:
                kept.append(paragraph)
                seen.add(paragraph)
    return "\n\n".join(kept) + "\n"
