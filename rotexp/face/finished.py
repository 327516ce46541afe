"""Measure and export from Python: a finished run, or a model in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotexp.config.explanations import Vocabulary
from rotexp.errors.requirements import MISSING
from rotexp.experiment.evaluation import measure
from rotexp.experiment.evaluation_request import to_request as to_evaluation
from rotexp.experiment.export_request import to_request as to_export
from rotexp.experiment.exporting import write_export
from rotexp.experiment.options import EvaluateConfig, ExportConfig
from rotexp.face.configs import composed, path_of
from rotexp.face.result import RunResult
from rotexp.files.folders import check_free
from rotexp.runfolder.finished_run import read_finished_run

if TYPE_CHECKING:
    from rotexp.metrics.quality import Quality
    from rotexp.rotation.model import RotatedModel

EVALUATE = Vocabulary(EvaluateConfig, grouped=False)
EXPORT = Vocabulary(ExportConfig, grouped=False)


@dataclass(frozen=True)
class Evaluation:
    """Held-out figures.

    Attributes:
        rows: perplexity, KL in nats to the float model and share of equal top-1 tokens of each variant.
        protocol: how they were made: digests of the texts, window, stride, tokens scored.
        facts: what was measured: run, model, quant, rotation, versions.
        notes: what people may not expect of the texts or the model.
    """

    rows: Mapping[str, Quality]
    protocol: Mapping[str, Any] = field(default_factory=dict, repr=False)
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    @property
    def perplexities(self) -> dict[str, float]:
        """The perplexity of each variant."""
        return {name: row.perplexity for name, row in self.rows.items()}


def evaluate(run: RunResult | str | Path | None = None, overrides: Sequence[str] = ()) -> Evaluation:
    """Measure held-out text as `python -m rotexp.evaluate` does, in this process, and return the same figures.

    Args:
        run: a finished run, or its folder; None measures a model as it comes, which an override names.
        overrides: as on that command line, such as `["evaluation.max_windows=4"]` or `["model=tiny", "quant=w4a4"]`.

    Raises:
        ValueError: the request is wrong; nothing was measured then.
        ArithmeticError: rotating or merging changed the float model.
    """
    from rotexp.metrics.quality import Quality

    notes: list[str] = []
    with composed(overrides, config_name="evaluate", known=EVALUATE, plugins=_plugins(run)) as composition:
        request = composition.config
        if request.out:
            raise ValueError(f"out={request.out}: is the command's; write what this function returns")
        if run is not None and request.run is not None:
            raise ValueError(f"run={request.run}: the run is given twice; leave the override out")
        request.run = request.run if run is None else str(_folder(run))
        finished = None if request.run is None else read_finished_run(Path(request.run))
        config = to_evaluation(request, finished)
    facts = measure(config, finished, say=notes.append)
    rows = facts.pop("evaluation")
    protocol = rows.pop("protocol")
    return Evaluation({name: Quality(**row) for name, row in rows.items()}, protocol, facts, tuple(notes))


def export(
    source: RunResult | RotatedModel | str | Path,
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    tokenizer: Any = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Path:
    """Write a checkpoint that plain transformers reads, rotations merged, or `R.bin`; return its folder.

    Args:
        source: a finished run, its folder, or a placed model of your own: merged for a checkpoint, not yet for `R.bin`.
            Under sharding every rank calls, and the first writes.
        path: a folder that does not exist or is empty.
        overrides: as for `python -m rotexp.export`, such as `["export.dtype=bfloat16"]` or `["export.online=true"]`.
        tokenizer: saved beside a model of your own (a run's is copied).
        say: takes lines about what was proved and written.

    Raises:
        ValueError: the request is wrong, or the model needs what a plain one does not do; nothing was written then.
        ArithmeticError: rotating or merging changed the float model.
        OSError: writing failed.
    """
    from rotexp.rotation.model import RotatedModel

    in_memory = isinstance(source, RotatedModel)
    target = path_of(path, key="path")
    with composed(overrides, config_name="export", known=EXPORT, plugins=_plugins(source)) as composition:
        request = composition.config
        for key, value in (("run", request.get("run")), ("export.path", request.export.get("path"))):
            if value not in (None, MISSING):
                raise ValueError(f"{key}={value}: is an argument of rotexp.export; leave the override out")
        request.run = "in memory" if in_memory else str(_folder(source))
        request.export.path = str(target)
        options = to_export(request).export
        finished = None if in_memory else read_finished_run(Path(request.run))
    if isinstance(source, RotatedModel):
        from rotexp.face.own_export import export_model

        export_model(source, target, options, tokenizer=tokenizer)
        return target
    if tokenizer is not None:
        raise ValueError("tokenizer: is copied from the run's model; leave it out")
    check_free(target, key="path")
    assert finished is not None
    write_export(finished, options, target, say=say)
    return target


def _plugins(run: object) -> tuple[str, ...]:
    """Return the modules that somebody granted when they made or opened the run."""
    return run.plugins if isinstance(run, RunResult) else ()


def _folder(run: object) -> Path:
    if isinstance(run, RunResult):
        return run.folder
    if isinstance(run, (str, Path)):
        return Path(run).absolute()
    raise ValueError(f"run: {type(run).__name__} is no run; give its folder, or what rotexp.run returned")
