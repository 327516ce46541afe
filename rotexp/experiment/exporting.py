"""Export a finished run: a checkpoint with its rotations merged, or `R.bin`."""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rotexp.config.composition import config_digest, to_plain
from rotexp.errors.library import is_out_of_memory
from rotexp.errors.requirements import require
from rotexp.errors.wording import dtype_name
from rotexp.experiment.options import ExportConfig, ExportDtype, ExportFormat, ExportOptions
from rotexp.files.folders import check_free, complete_folder
from rotexp.process.exit_codes import DONE, FAILED
from rotexp.process.outer import is_first
from rotexp.process.signals import Interrupted, interruptible
from rotexp.runfolder.finished_run import FinishedRun, read_finished_run

if TYPE_CHECKING:
    from rotexp.experiment.rebuild import Rebuilt


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
    try:
        with interruptible():
            return _export(run, request.export, target)
    except Interrupted as interruption:
        _complain(str(interruption), target)
        return interruption.exit_code
    except (ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise  # a defect, which keeps its traceback
        _complain(str(error) or type(error).__name__, target)
        return FAILED


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


def _complain(reason: str, target: Path) -> None:
    left = "is complete" if target.is_dir() and any(target.iterdir()) else "was not written"
    sys.stderr.write(f"rotexp: the export failed: {' '.join(reason.split())}; export.path={target} {left}\n")


def _export(run: FinishedRun, options: ExportOptions, target: Path) -> int:
    """Rebuild, check, merge and write; returns the exit code."""
    from rotexp.experiment.rebuild import merge_rebuilt, rebuild

    rebuilt = rebuild(run)
    _check_requirements(rebuilt, options)
    if options.format is ExportFormat.checkpoint:
        _check_companions(rebuilt)
    error = merge_rebuilt(rebuilt)
    sys.stdout.write(f"invariance: relative logit error {error:.1e}\n")
    write = _write_checkpoint if options.format is ExportFormat.checkpoint else _write_r_bin
    sys.stdout.write(write(run, rebuilt, options, target) + "\n")
    return DONE


def _check_requirements(rebuilt: Rebuilt, options: ExportOptions) -> None:
    """Refuse what the format cannot hold, and what a plain model cannot do unless asked for.

    Raises:
        ValueError: there are no rotations to write, merged parameters have no place in the plain model, a transform
            must run online, or norms must run as another kind.
    """
    if options.format is ExportFormat.r_bin and not rebuilt.loaded.matrices:
        raise ValueError("export.format=r_bin: this run has no rotations; set export.format=checkpoint")
    if options.format is ExportFormat.r_bin and rebuilt.trained is not None:
        raise ValueError(
            "export.format=r_bin: more than rotations was trained, which R.bin does not hold; set "
            "export.format=checkpoint"
        )
    if options.format is ExportFormat.checkpoint and (added := sorted(rebuilt.model.added)):
        raise ValueError(
            f"export.format=checkpoint: the merged model has {len(added)} parameters that the plain one lacks (such as "
            f"{added[0]}); set export.format=r_bin"
        )
    needs = [f"{transform['name']} of order {transform['order']}" for transform in rebuilt.must_run["online"]]
    if norms := rebuilt.must_run["rms_norms"]:
        needs.append(f"{len(norms)} norms of model_type={rebuilt.checkpoint.config.model_type} as RMSNorm")
    if needs and not options.online:
        raise ValueError(
            f"export.online=false: the merged model needs {' and '.join(needs)} at run time, which plain transformers "
            f"does not do; set export.online=true to export all the same, with a manifest that says so"
        )


def _check_companions(rebuilt: Rebuilt) -> None:
    """Refuse a tokenizer or generation config that is lost or damaged since the run, before the model is read.

    Raises:
        ValueError: one cannot be read; its file is named.
    """
    from rotexp.models.save import companions
    from rotexp.models.tokenizer import load_tokenizer

    load_tokenizer(rebuilt.checkpoint)
    companions(rebuilt.checkpoint)


def _manifest(run: FinishedRun, rebuilt: Rebuilt, options: ExportOptions) -> dict[str, Any]:
    """Say what was exported, from what, and what it takes to run it."""
    plain, checkpoint = to_plain(run.config), rebuilt.checkpoint
    return {
        "rotexp": version("rotexp"),
        "format": options.format.name,
        "source": {"id": checkpoint.identity, "revision": checkpoint.revision},
        "config_digest": config_digest(run.config),
        "seed": run.config.seed,
        "rotations": {
            name: {"placement": rebuilt.model.placements[name], "shape": list(matrix.shape)}
            for name, matrix in rebuilt.loaded.matrices.items()
        },
        "must_run": rebuilt.must_run,
        "trained_for": plain["quant"],
        "trained": run.config.train.params.name,
    }


def _write_checkpoint(run: FinishedRun, rebuilt: Rebuilt, options: ExportOptions, target: Path) -> str:
    """Write the merged model; returns what to tell people."""
    import torch

    from rotexp.models.save import companions, save_checkpoint
    from rotexp.models.tokenizer import code_of_its_own, load_tokenizer

    checkpoint = rebuilt.checkpoint
    copied = companions(checkpoint)
    wanted = run.config.model.dtype.name if options.dtype is ExportDtype.auto else options.dtype.name
    dtype = dtype_name(checkpoint.dtype) if wanted == "auto" else wanted
    save_checkpoint(
        target,
        rebuilt.model.network.state_dict(),
        checkpoint.config,
        dtype=getattr(torch, dtype),
        tokenizer=None if copied else load_tokenizer(checkpoint),
        copied=copied,
        manifest=_manifest(run, rebuilt, options) | {"dtype": dtype},
        clip_ratios=rebuilt.model.scales.ratios() if rebuilt.model.scales else None,
        source_shapes=checkpoint.weights.shapes(),
        max_shard_size=options.max_shard_size,
    )
    code = code_of_its_own(Path(checkpoint.tokenizer))
    note = code and f"\nnote: tokenizer_config.json names code ({code}), which was not copied; load it without"
    return f'wrote {target} ({dtype}); load it by AutoModelForCausalLM.from_pretrained("{target}"){note}'


def _write_r_bin(run: FinishedRun, rebuilt: Rebuilt, options: ExportOptions, target: Path) -> str:
    """Write the rotations as `R.bin`; returns what to tell people."""
    from rotexp.models.save import MANIFEST_FILE
    from rotexp.rotation.file import save_r_bin

    with complete_folder(target, key="export.path") as folder:
        save_r_bin(folder / "R.bin", rebuilt.loaded.matrices, layers=rebuilt.model.spec.layers)
        text = json.dumps(_manifest(run, rebuilt, options), indent=2)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    return f'wrote {target}/R.bin; load it by torch.load("{target}/R.bin", weights_only=True)'
