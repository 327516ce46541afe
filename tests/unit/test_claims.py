"""Two processes never work in one folder; where a file system knows no locks, that is said and nothing else."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from rotexp.files import folders
from rotexp.files.folders import claimed


def test_a_folder_is_one_process_s_until_it_lets_go(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with claimed(folder, key="hydra.run.dir"):
        refusal = r"^hydra\.run\.dir=.*run: another process runs in it; wait, or choose another$"
        with pytest.raises(ValueError, match=refusal), claimed(folder, key="hydra.run.dir"):
            pass
    with claimed(folder, key="hydra.run.dir"):
        assert folder.is_dir()


def test_a_file_system_without_locks_is_worked_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_file: object, _operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), claimed(tmp_path, key="hydra.run.dir"):
        pass
    assert "cannot be locked (No locks available)" in caplog.text
