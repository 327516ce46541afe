"""A finished run, read back from its folder: its configuration and its end state."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rotexp.config.composition import to_config
from rotexp.config.own_parts import writable
from rotexp.config.schema import Config
from rotexp.config.targets import NotGrantedError
from rotexp.files.reading import UnreadableError, read_yaml
from rotexp.runfolder.layout import CONFIG_FILE, ROTATIONS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import read_summary


@dataclass(frozen=True)
class FinishedRun:
    """A run that is done."""

    folder: Path
    config: Config
    summary: dict[str, Any]

    @property
    def rotations(self) -> Path:
        """The file of its rotations."""
        return self.folder / ROTATIONS_FILE

    @property
    def trained_steps(self) -> int:
        """How many steps it trained.

        Raises:
            ValueError: its summary does not say so.
        """
        train = self.summary.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        if not isinstance(steps, int):
            raise ValueError(f"run={self.folder}: {SUMMARY_FILE} says no train.steps; restore it, or name another run")
        return steps

    @property
    def protocol(self) -> dict[str, Any]:
        """How it was measured: digests of its texts among others.

        Raises:
            ValueError: its summary does not say so.
        """
        evaluation = self.summary.get("evaluation")
        protocol = evaluation.get("protocol") if isinstance(evaluation, dict) else None
        if not isinstance(protocol, dict) or not isinstance(protocol.get("calibration_digest"), str):
            raise ValueError(
                f"run={self.folder}: {SUMMARY_FILE} says no evaluation.protocol.calibration_digest; restore it, or "
                f"name another run"
            )
        return protocol


def read_finished_run(folder: Path, *, key: str | None = "run") -> FinishedRun:
    """Read a run's folder; loads no torch.

    Args:
        key: the configuration's key that named it, for the message (None: no key did).

    Raises:
        ValueError: there is no run, it is not done, a file of it is missing or cannot be read, or its model has gone.
    """
    where = str(folder) if key is None else f"{key}={folder}"
    if not folder.is_dir():
        raise ValueError(f"{where}: no such folder; name the folder of a finished run")
    if not (folder / SUMMARY_FILE).is_file():
        raise ValueError(f"{where}: holds no run ({SUMMARY_FILE} is missing); name the folder of a finished run")
    summary = _read_summary(folder, where)
    if summary.get("status") != "done":
        raise ValueError(f"{where}: the run is not done (status {summary.get('status')}); name one that is")
    if summary.get("simulated_world"):
        raise ValueError(f"{where}: simulated a world and trained nothing whole; name a real run")
    for name in (CONFIG_FILE, ROTATIONS_FILE):
        if not (folder / name).is_file():
            raise ValueError(f"{where}: {name} is missing; restore it, or run the training again")
    config = read_config(folder, where)
    _check_model(config.model.path, where)
    return FinishedRun(folder, config, summary)


def _check_model(path: str | None, where: str) -> None:
    """Refuse a run whose model has gone; a local one is recorded by its whole path, and a hub id is none."""
    if path and Path(path).is_absolute() and not Path(path).exists():
        raise ValueError(f"{where}: its model is no longer at {path}; put it back there")


def _read_summary(folder: Path, where: str) -> dict[str, Any]:
    try:
        return read_summary(folder)
    except UnreadableError as error:
        raise ValueError(f"{where}: {SUMMARY_FILE} cannot be read ({error.reason}); name another run") from None


def read_config(folder: Path, where: str | None = None) -> Config:
    """Read the resolved configuration of a run, done or not, as data: interpolations are refused, not resolved.

    Args:
        where: how messages call the folder (None: by its path).

    Raises:
        ValueError: it is missing, or not that of a run.
    """
    file, where = folder / CONFIG_FILE, where or str(folder)
    if not file.is_file():
        raise ValueError(f"{where}: {file.name} is missing; restore it, or run the training again")
    try:
        plain = read_yaml(file)
        if "${" in json.dumps(plain):
            raise ValueError("it holds an interpolation")
        values = OmegaConf.create({key: value for key, value in plain.items() if key != "defaults"})
        return to_config(OmegaConf.merge(writable(Config), values))  # type: ignore[arg-type]
    except NotGrantedError as error:
        raise ValueError(f"{where}: names a part of your own ({error})") from None
    except (OmegaConfBaseException, ValueError) as error:
        reason = error.reason if isinstance(error, UnreadableError) else " ".join(str(error).split())
        raise ValueError(f"{where}: {file.name} is not the configuration of a run ({reason}); restore it") from None
