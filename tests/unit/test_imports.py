"""What a run imports is not searched for cycles, while it is imported or later; nothing else is exempted."""

import gc
import subprocess
import sys

import pytest

from rotexp.process import imports
from rotexp.process.imports import uncollected


def test_the_collector_rests_while_torch_is_imported_and_passes_over_it_later() -> None:
    code = (
        "import gc, sys; from rotexp.process.imports import uncollected\n"
        "with uncollected():\n"
        "    during = gc.isenabled()\n"
        "    import torch\n"
        "print(during, gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "False True True\n"


def test_a_process_that_has_torch_stays_as_it_is() -> None:
    frozen = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_failure_to_import_lets_the_collector_work_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "HEAVY", "not.imported")
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_one_who_has_switched_the_collector_off_keeps_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "HEAVY", "not.imported")
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
