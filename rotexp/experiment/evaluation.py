"""Measure held-out text again: of a finished run, or of a model as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rotexp.config.schema import Config
from rotexp.data.corpora import text_digest
from rotexp.errors.wording import dtype_name
from rotexp.experiment.context import compute_dtype
from rotexp.experiment.finished_model import build_finished, merge_finished
from rotexp.experiment.inputs import Inputs, open_inputs, read_within_limit
from rotexp.experiment.measurements import Measurements
from rotexp.files.folders import write_atomically
from rotexp.models.load import resolve_model, summarize_model
from rotexp.models.materialize import materialize
from rotexp.process.saying import say
from rotexp.rotation.building import build_for_run
from rotexp.runfolder.finished_run import FinishedRun
from rotexp.runfolder.records import finite
from rotexp.sharding.communication import Communication
from rotexp.tracking.console import results_table
from rotexp.tracking.summary import versions


def show_figures(config: Config, run: FinishedRun | None, out: Path | None) -> None:
    """Measure what a request names, print the table, and write the figures to a file if one is named.

    Raises:
        ValueError, ArithmeticError: as `measure`.
        OSError: the file cannot be written.
    """
    trained = run is not None and run.trained_steps > 0
    facts = measure(config, run, say=say)
    title = f"{facts['model']['id']}, quant={config.quant.name}, rotation={config.rotation.name}"
    table = results_table(facts["evaluation"], title=title, trained=trained, seconds=facts["evaluation_seconds"])
    Console().print(table)
    if out is not None:
        write_atomically(out, json.dumps(finite(facts), indent=2, allow_nan=False) + "\n")
        say(f"wrote {out}")


def measure(config: Config, run: FinishedRun | None, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what a request names; return the figures, and what they are of.

    Args:
        config: of `to_request`.
        say: takes lines for people.

    Raises:
        ValueError: the request is wrong; nothing was measured then.
        ArithmeticError: rotating or merging changed the float model.
    """
    inputs = open_inputs(config)
    if run is not None:
        _check_calibration(run, config, inputs)
    for warning in inputs.warnings:
        say(f"warning: {warning}")
    config = replace(config, model=resolve_model(config.model, inputs.checkpoint))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    communication = Communication(device=device)
    measurements = Measurements(
        config, inputs, communication=communication, device=device, ranks_per_node=None, known={}, say=say
    )
    if run is None:
        _measure_model(config, inputs, measurements, device)
    else:
        _measure_run(run, measurements, device, say=say)
    return {
        "run": None if run is None else str(run.folder.resolve()),
        "model": summarize_model(config.model, inputs.checkpoint),
        "quant": config.quant.name,
        "rotation": config.rotation.name,
        "evaluation": measurements.rows,
        "evaluation_seconds": measurements.seconds,
        "versions": versions(),
    }


def _check_calibration(run: FinishedRun, config: Config, inputs: Inputs) -> None:
    """Refuse to measure a run on the text that it was calibrated on, of which its summary keeps the digest.

    Texts are compared as they were read and up to the run's own limit, and however they are written; of a run before
    that was kept, by the digest of its very characters. One written in more characters than the limit is not known.

    Raises:
        ValueError: it is that text, or the run's summary keeps no digest.
    """
    protocol = run.protocol
    limit = run.config.data.max_characters
    found = {inputs.protocol["text_digest"], inputs.protocol["text_spelling"]}
    if limit != config.data.max_characters:
        corpus, _longer = read_within_limit(replace(config.data, max_characters=limit))
        found |= {text_digest(corpus.evaluation), corpus.evaluation_spelling}
    known = protocol["calibration_digest"]
    if found & {known, protocol.get("calibration_spelling")}:
        raise ValueError(
            f"data.evaluation={config.data.evaluation}: is the text that the run was calibrated on (digest {known}), "
            f"whatever its spelling; held-out figures need another"
        )


def _measure_model(config: Config, inputs: Inputs, measurements: Measurements, device: torch.device) -> None:
    """Measure a checkpoint: float, and quantized if anything is."""
    model = build_for_run(inputs.checkpoint, config, dtype=getattr(torch, config.model.dtype.name))
    materialize(model.network, inputs.checkpoint, device=device)
    measurements.as_it_comes(model)
    if not config.quant.enabled:
        del measurements.rows["quantized"]


def _measure_run(
    run: FinishedRun, measurements: Measurements, device: torch.device, *, say: Callable[[str], None]
) -> None:
    """Measure what a run began with, and the merged model that it ended with, in float32."""
    computed = compute_dtype(run.config)
    if computed is not torch.float32:
        say(f"note: the run computed in {dtype_name(computed)}, and is measured in float32")
    finished = build_finished(run)
    model = finished.model
    materialize(model.network, finished.checkpoint, device=device, added=model.added)
    measurements.as_it_comes(model)
    error = merge_finished(finished)  # on the CPU
    say(f"invariance: relative logit error {error:.1e}")
    for module in (model.network, *([] if model.scales is None else [model.scales])):
        module.to(device)
    measurements.trained(model)
