"""Measure held-out text again: of a finished run, or of a model as it comes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from rotexp.config.composition import to_config
from rotexp.config.own_parts import writable
from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import KEYS_OF_SOURCE, DataConfig, DataSource
from rotexp.errors.library import is_out_of_memory
from rotexp.experiment.options import EvaluateConfig
from rotexp.files.folders import write_atomically
from rotexp.models.options import ModelDtype
from rotexp.process.exit_codes import DONE, FAILED
from rotexp.process.outer import is_first
from rotexp.process.signals import Interrupted, interruptible
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.finished_run import FinishedRun, read_finished_run
from rotexp.sharding.options import ShardingConfig, SyncConfig
from rotexp.training.options import TrainConfig

if TYPE_CHECKING:
    import torch

    from rotexp.experiment.inputs import Inputs
    from rotexp.experiment.measurements import Measurements

OWN_KEYS = ("run", "out", "plugins")
"""What a run's configuration does not have."""

OF_A_RUN = ("data", "evaluation")
"""What may be set of a run: how it is measured, not what it is."""

AS_IT_COMES = Config(
    data=DataConfig("builtin", DataSource.builtin),
    quant=QuantConfig("none"),
    rotation=RotationConfig("none", r1=False, r2=False, learned=False),
    optimizer=COMPONENTS["optimizer"]["cayley_sgd"],
    objective=COMPONENTS["objective"]["ce"],
    train=TrainConfig(steps=0),
)
"""What is measured where there is no run; the model is to be named."""


def evaluate(composed: DictConfig) -> int:
    """Carry out one composed evaluation and return its exit code.

    Raises:
        ValueError: the request is wrong; nothing was measured or written then.
    """
    if not is_first():
        return DONE
    if OmegaConf.get_type(composed) is not EvaluateConfig:
        raise ValueError("the configuration is not based on evaluate's schema; begin its defaults: - evaluate_schema")
    run = read_finished_run(Path(composed.run)) if composed.run else None
    config = to_request(composed, run)
    out = Path(composed.out) if composed.out else None
    if out is not None:
        _check_target(out)
    try:
        with interruptible():
            return _evaluate(config, run, out)
    except Interrupted as interruption:
        _complain(str(interruption))
        return interruption.exit_code
    except (ArithmeticError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise  # a defect, which keeps its traceback
        _complain(str(error) or type(error).__name__)
        return FAILED


def to_request(composed: DictConfig, run: FinishedRun | None) -> Config:
    """Return what to measure: a run's configuration, or the default one, with what was given in it.

    Raises:
        ValueError: neither a run nor a model is given, or what a run has of its own, or a value cannot be used.
    """
    values = OmegaConf.to_container(composed, resolve=True)
    blank = OmegaConf.to_container(writable(EvaluateConfig))
    assert isinstance(values, dict)
    assert isinstance(blank, dict)
    given = {str(key): value for key, value in values.items() if key not in OWN_KEYS and value != blank.get(key)}
    if run is None and "model" not in given:
        raise ValueError("run: has no value; set run=DIR, or choose a model by model=OPTION")
    own = ", ".join(key for key in given if key not in OF_A_RUN)
    if run is not None and own:
        raise ValueError(f"run={composed.run}: is measured with {own} of its own; leave out {own}, or run")
    base = AS_IT_COMES if run is None else _in_one_process(run.config)
    if isinstance(source := given.get("data", {}).get("source"), DataSource):
        base = replace(base, data=_without_keys_of_others(base.data, source))
    return to_config(OmegaConf.merge(writable(base), given))  # type: ignore[arg-type]


def _without_keys_of_others(data: DataConfig, source: DataSource) -> DataConfig:
    """Return the options of `data` without those that only other sources than this one read."""
    others = (keys for other, keys in KEYS_OF_SOURCE.items() if other is not source)
    unset: dict[str, Any] = {key: None for keys in others for key in keys}
    return replace(data, **unset)


def _in_one_process(config: Config) -> Config:
    """Return a run's configuration for a model that is whole, in float32, and has its rotations already."""
    return replace(
        config,
        model=replace(config.model, dtype=ModelDtype.float32),
        rotation=replace(config.rotation, path=None),
        sharding=ShardingConfig(),
        sync_mode=SyncConfig(),
    )


def _check_target(out: Path) -> None:
    """Refuse a place for the file that holds something, or cannot hold it.

    Raises:
        ValueError: there is something, or no folder to hold it.
    """
    if out.exists():
        raise ValueError(f"out={out}: is there already; name a new file")
    if not out.parent.is_dir():
        raise ValueError(f"out={out}: {out.parent} is no folder; make it first")


def _complain(reason: str) -> None:
    sys.stderr.write(f"rotexp: the evaluation failed: {' '.join(reason.split())}; nothing was written\n")


def _evaluate(config: Config, run: FinishedRun | None, out: Path | None) -> int:
    """Measure, print and write; returns the exit code."""
    import torch
    from rich.console import Console

    from rotexp.experiment.inputs import open_inputs
    from rotexp.experiment.measurements import Measurements
    from rotexp.models.load import resolve_model
    from rotexp.sharding.communication import Communication
    from rotexp.tracking.console import results_table

    trained = run is not None and run.trained_steps > 0
    inputs = open_inputs(config)
    if run is not None:
        _check_calibration(run, config, inputs)
    sys.stdout.writelines(f"warning: {warning}\n" for warning in inputs.warnings)
    config = replace(config, model=resolve_model(config.model, inputs.checkpoint))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measurements = Measurements(
        config,
        inputs,
        communication=Communication(device=device),
        device=device,
        ranks_per_node=None,
        known={},
    )
    if run is None:
        _measure_model(config, inputs, measurements, device)
    else:
        _measure_run(run, measurements, device)
    title = f"{inputs.checkpoint.identity}, quant={config.quant.name}, rotation={config.rotation.name}"
    Console().print(results_table(measurements.rows, title=title, trained=trained))
    if out is not None:
        write_atomically(out, _to_json(config, run, inputs, measurements))
        sys.stdout.write(f"wrote {out}\n")
    return DONE


def _check_calibration(run: FinishedRun, config: Config, inputs: Inputs) -> None:
    """Refuse to measure a run on the text that it was calibrated on, of which its summary keeps the digest.

    Texts are compared as they were read and up to the run's own limit, and however they are written; of a run before
    that was kept, by the digest of its very characters. One written in more characters than the limit is not known.

    Raises:
        ValueError: it is that text, or the run's summary keeps no digest.
    """
    from rotexp.data.corpora import text_digest
    from rotexp.experiment.inputs import read_within_limit

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
    import torch

    from rotexp.models.materialize import materialize
    from rotexp.rotation.building import build_for_run

    model = build_for_run(inputs.checkpoint, config, dtype=getattr(torch, config.model.dtype.name))
    materialize(model.network, inputs.checkpoint, device=device)
    measurements.as_it_comes(model)
    if not config.quant.enabled:
        del measurements.rows["quantized"]


def _measure_run(run: FinishedRun, measurements: Measurements, device: torch.device) -> None:
    """Measure what a run began with, and the merged model that it ended with, in float32."""
    import torch

    from rotexp.errors.wording import dtype_name
    from rotexp.experiment.rebuild import merge_rebuilt, rebuild
    from rotexp.models.materialize import materialize
    from rotexp.sharding.strategies import precision_policy

    computed = precision_policy(run.config.sharding).param_dtype or getattr(torch, run.config.model.dtype.name)
    if computed is not torch.float32:
        sys.stdout.write(f"note: the run computed in {dtype_name(computed)}, and is measured in float32\n")
    rebuilt = rebuild(run)
    model = rebuilt.model
    materialize(model.network, rebuilt.checkpoint, device=device, added=model.added)
    measurements.as_it_comes(model)
    error = merge_rebuilt(rebuilt)  # on the CPU
    sys.stdout.write(f"invariance: relative logit error {error:.1e}\n")
    for module in (model.network, *([] if model.scales is None else [model.scales])):
        module.to(device)
    measurements.trained(model)


def _to_json(config: Config, run: FinishedRun | None, inputs: Inputs, measurements: Measurements) -> str:
    """Return the figures, and what they are of."""
    from rotexp.models.load import summarize_model
    from rotexp.runfolder.records import finite
    from rotexp.tracking.summary import versions

    facts = {
        "run": None if run is None else str(run.folder.resolve()),
        "model": summarize_model(config.model, inputs.checkpoint),
        "quant": config.quant.name,
        "rotation": config.rotation.name,
        "evaluation": measurements.rows,
        "versions": versions(),
    }
    return json.dumps(finite(facts), indent=2, allow_nan=False) + "\n"
