"""Which checkpoint a run continues from, if any."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rotexp.config.schema import Config
from rotexp.errors.requirements import require
from rotexp.files.reading import UnreadableError
from rotexp.runfolder.checkpoint_folders import find_checkpoint, read_facts
from rotexp.runfolder.layout import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from rotexp.runfolder.records import STATUSES, read_summary


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Attributes:
        path: the checkpoint (None: at the first step).
        own: whether it is the run's own, which then continues, and not another's, from which it starts.
        notes: what people should know: which checkpoints were passed over, and why.
    """

    path: Path | None = None
    own: bool = False
    notes: tuple[str, ...] = ()


def find_beginning(config: Config, folder: Path) -> Beginning:
    """Find where the run in `folder` begins; loads no torch.

    Raises:
        ValueError: the folder holds a run that may not be continued, or whose state is unknown and that has no
            checkpoint; there is no checkpoint where `resume` says, or it is past the last step or of other parameters.
    """
    _check_files(folder)
    notes: tuple[str, ...] = ()
    if (folder / SUMMARY_FILE).exists():
        damage = _check_unfinished(config, folder)
        found = find_checkpoint(folder)
        notes = (*damage, *found.skipped)
        if found.path is not None:
            _check_goes_on(config, found.path)
            return Beginning(found.path, own=True, notes=notes)
        if damage:
            remedy = f"restore {SUMMARY_FILE}, or remove it to start again, or choose another folder"
            raise ValueError(f"hydra.run.dir={folder}: {'; '.join(notes)}; no complete checkpoint is there; {remedy}")
        notes = (*notes, "the run in this folder left no complete checkpoint; it starts again")
    if config.resume in ("auto", "never"):
        return Beginning(notes=notes)
    found = find_checkpoint(Path(config.resume))
    if found.path is None:
        reasons = "; ".join(found.skipped) or "none is there"
        raise ValueError(f"resume={config.resume}: holds no complete checkpoint ({reasons}); name a run that has one")
    _check_goes_on(config, found.path)
    return Beginning(found.path, notes=(*notes, *found.skipped))


def check_model(beginning: Beginning, identity: str) -> None:
    """Refuse the checkpoint of another model.

    Raises:
        ValueError: it is one.
    """
    if beginning.path is not None:
        saved = read_facts(beginning.path)["facts"]["base"]["model"]
        remedy = f"resume with that model, or start in another folder than that of {beginning.path}"
        require(saved == identity, "model", identity, f"{saved}, as it was", remedy)


def _check_files(folder: Path) -> None:
    """Refuse a folder in which something stands where the run writes its files."""
    for name in (SUMMARY_FILE, METRICS_FILE, CONFIG_FILE):
        if (folder / name).is_dir():
            raise ValueError(f"hydra.run.dir={folder}: {name} in it is a folder; remove it, or choose another folder")


def _check_unfinished(config: Config, folder: Path) -> list[str]:
    """Refuse to continue a run that is done, or that is not to be continued; return what is wrong with its summary."""
    try:
        status = read_summary(folder).get("status")
        damage = [] if status in STATUSES else [f"{SUMMARY_FILE} says no status that there is"]
    except UnreadableError as error:
        status, damage = None, [f"{SUMMARY_FILE} cannot be read ({error.reason})"]
    where = f"hydra.run.dir={folder}: already holds a run ({damage[0] if damage else f'status {status}'})"
    if status == "done":
        raise ValueError(f"{where}; choose another, or remove it")
    if config.resume == "never":
        raise ValueError(f"{where}, and resume=never; choose another, or resume=auto to continue it")
    return damage


def _check_goes_on(config: Config, path: Path) -> None:
    saved, train = read_facts(path), config.train
    remedy = f"change it, or start in another folder than that of {path}"
    require(saved["step"] <= train.steps, "train.steps", train.steps, f"at least the {saved['step']} done", remedy)
    params = saved["facts"]["config"]["train"]["params"]
    require(params == train.params.name, "train.params", train.params.name, f"{params}, as it was", remedy)
