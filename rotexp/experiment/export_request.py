"""What an export is asked for: which finished run, what of it, and where."""

from __future__ import annotations

import re
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from rotexp.errors.requirements import require
from rotexp.experiment.options import ExportConfig, ExportOptions
from rotexp.files.folders import check_free
from rotexp.process.exit_codes import DONE
from rotexp.process.imports import uncollected
from rotexp.process.one_process import carry_out
from rotexp.process.outer import is_first
from rotexp.runfolder.finished_run import FinishedRun, read_finished_run


def export(composed: DictConfig) -> int:
    """Carry out one composed export and return its exit code.

    Raises:
        ValueError: the request is wrong; nothing was written then.
    """
    if not is_first():
        return DONE
    request = to_request(composed)
    target = Path(request.export.path)
    run = read_finished_run(Path(request.run))
    check_free(target, key="export.path")
    return carry_out(lambda: _export(run, request.export, target), name="export", left=lambda: _left(target))


def to_request(composed: DictConfig) -> ExportConfig:
    """Turn Hydra's composition into the request.

    Raises:
        ValueError: it is not based on the schema, `run` or `export.path` has no value, or a size cannot be read.
    """
    if OmegaConf.get_type(composed) is not ExportConfig:
        raise ValueError("the configuration is not based on export's schema; begin its defaults with `- export_schema`")
    for key in ("run", "export.path"):
        if not OmegaConf.select(composed, key, throw_on_missing=False):
            raise ValueError(f"{key}: has no value; set {key}=DIR")
    request = OmegaConf.to_object(composed)
    assert isinstance(request, ExportConfig)
    size = request.export.max_shard_size
    readable = re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", size) is not None
    require(readable, "export.max_shard_size", size, "a whole number of KB, MB, GB or TB", "write 5GB or so")
    return request


def _export(run: FinishedRun, options: ExportOptions, target: Path) -> None:
    with uncollected():
        from rotexp.experiment.exporting import write_export  # what imports torch, once the request is right
    from rotexp.process.saying import say

    write_export(run, options, target, say=say)


def _left(target: Path) -> str:
    state = "is complete" if target.is_dir() and any(target.iterdir()) else "was not written"
    return f"export.path={target} {state}"
