"""Read the built-in corpus in a process beside this one, which imports meanwhile what it needs to use it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rotexp.data.options import DataConfig, DataSource

if TYPE_CHECKING:
    from rotexp.data.corpora import Corpus

ENTRY = (
    "from signal import SIGKILL; from rotexp.process.signals import end_with_parent; end_with_parent(SIGKILL); "
    "from rotexp.data.reading_ahead import hand_over; hand_over()"
)
"""What the process does."""


@contextmanager
def reading_ahead(data: DataConfig) -> Iterator[Callable[[], Corpus]]:
    """Read the built-in corpus beside this process until the end of the block, if it is the one that is asked for.

    Yields:
        What returns the built-in corpus, to be called once; where torch is imported already, so that this process had
        nothing to do meanwhile, it reads it here.

    Raises:
        RuntimeError: when the corpus is asked for, and the process failed.
    """
    if data.source is not DataSource.builtin or "torch" in sys.modules:
        from rotexp.data.corpora import builtin_corpus

        yield builtin_corpus
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", ENTRY],  # -P: the working folder counts where it does in this process
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C comes to this process alone
    )

    def corpus() -> Corpus:
        written, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the built-in corpus could not be read in a process of its own: {errors.decode()}")
        read: Corpus = pickle.loads(written)
        return read

    with process:
        try:
            yield corpus
        finally:
            process.kill()


def hand_over() -> None:
    """Write the built-in corpus, its digests made, to standard output for the process that started this one."""
    from rotexp.data.corpora import builtin_corpus

    corpus = builtin_corpus()
    assert corpus.calibration_spelling != corpus.evaluation_spelling  # kept by the corpus once they are asked for
    pickle.dump(corpus, sys.stdout.buffer)
