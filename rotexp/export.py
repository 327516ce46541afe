"""Export a finished run: `python -m rotexp.export run=DIR export.path=DIR` writes a checkpoint, or `R.bin`."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rotexp.command_line import run_command
from rotexp.compose import config_digest, to_plain
from rotexp.config import ExportConfig, ExportDtype, ExportFormat, ExportOptions
from rotexp.finished_run import FinishedRun, read_finished_run
from rotexp.launch.outer import is_first
from rotexp.launch.signals import Interrupted, interruptible
from rotexp.wrong_request import Vocabulary

if TYPE_CHECKING:
    from rotexp.rebuild import Rebuilt

DONE, FAILED = 0, 1


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
    from rotexp.models.save import check_free, check_shard_size

    check_free(target)
    check_shard_size(request.export.max_shard_size)
    try:
        with interruptible():
            return _export(run, request.export, target)
    except Interrupted as interruption:
        _complain(str(interruption), target)
        return interruption.exit_code
    except (ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        _complain(str(error) or type(error).__name__, target)
        return FAILED


def to_request(composed: DictConfig) -> ExportConfig:
    """Turn Hydra's composition into the request.

    Raises:
        ValueError: it is not based on the schema, or `run` or `export.path` has no value.
    """
    if OmegaConf.get_type(composed) is not ExportConfig:
        raise ValueError("the configuration is not based on export's schema; begin its defaults with `- export_schema`")
    for key in ("run", "export.path"):
        if not OmegaConf.select(composed, key, throw_on_missing=False):
            raise ValueError(f"{key}: has no value; set {key}=DIR")
    request = OmegaConf.to_object(composed)
    assert isinstance(request, ExportConfig)
    return request


def _complain(reason: str, target: Path) -> None:
    left = "is complete" if target.is_dir() and any(target.iterdir()) else "was not written"
    sys.stderr.write(f"rotexp: the export failed: {' '.join(reason.split())}; export.path={target} {left}\n")


def _export(run: FinishedRun, options: ExportOptions, target: Path) -> int:
    """Rebuild, check, merge and write; returns the exit code."""
    from rotexp.rebuild import merge_rebuilt, rebuild

    rebuilt = rebuild(run)
    _check_plain(rebuilt.must_run, options)
    error = merge_rebuilt(rebuilt)
    sys.stdout.write(f"invariance: relative logit error {error:.1e}\n")
    write = _write_checkpoint if options.format is ExportFormat.checkpoint else _write_r_bin
    sys.stdout.write(write(run, rebuilt, options, target) + "\n")
    return DONE


def _check_plain(must_run: dict[str, Any], options: ExportOptions) -> None:
    """Refuse what a plain model cannot do, unless asked for.

    Raises:
        ValueError: a transform must run online, or a norm must run as another kind.
    """
    needs = [f"{transform['name']} of order {transform['order']}" for transform in must_run["online"]]
    needs += [f"{len(must_run['norms']['names'])} norms as RMSNorm"] if must_run["norms"]["names"] else []
    if needs and not options.online:
        raise ValueError(
            f"export.online=false: this run's model needs {' and '.join(needs)} at run time, which plain transformers "
            f"does not do; set export.online=true to export all the same, with a manifest that says so"
        )


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
    }


def _write_checkpoint(run: FinishedRun, rebuilt: Rebuilt, options: ExportOptions, target: Path) -> str:
    """Write the merged model; returns what to tell people."""
    import torch

    from rotexp.models.load import load_tokenizer
    from rotexp.models.save import generation_file, save_checkpoint

    dtype = run.config.model.dtype.name if options.dtype is ExportDtype.auto else options.dtype.name
    checkpoint = rebuilt.checkpoint
    save_checkpoint(
        target,
        rebuilt.model.network.state_dict(),
        checkpoint.config,
        dtype=getattr(torch, dtype),
        tokenizer=load_tokenizer(checkpoint),
        generation_config=generation_file(checkpoint),
        manifest=_manifest(run, rebuilt, options) | {"dtype": dtype},
        source_shapes=checkpoint.weights.shapes(),
        max_shard_size=options.max_shard_size,
    )
    return f'wrote {target} ({dtype}); load it by AutoModelForCausalLM.from_pretrained("{target}")'


def _write_r_bin(run: FinishedRun, rebuilt: Rebuilt, options: ExportOptions, target: Path) -> str:
    """Write the rotations as `R.bin`; returns what to tell people."""
    from rotexp.models.save import MANIFEST_FILE, complete_folder
    from rotexp.rotation.file import save_r_bin

    with complete_folder(target) as folder:
        save_r_bin(folder / "R.bin", rebuilt.loaded.matrices, layers=rebuilt.model.spec.layers)
        text = json.dumps(_manifest(run, rebuilt, options), indent=2)
        (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")
    return f'wrote {target}/R.bin; load it by torch.load("{target}/R.bin", weights_only=True)'


def main() -> None:
    """Compose the request from the command line, and export."""
    run_command(export, config_name="export", known=Vocabulary(ExportConfig, grouped=False))


if __name__ == "__main__":
    main()
