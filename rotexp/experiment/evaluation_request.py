"""What an evaluation is asked for: a finished run's configuration, or a default one, with what was given in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rotexp.config.composition import to_config
from rotexp.config.own_parts import writable
from rotexp.config.schema import COMPONENTS, Config
from rotexp.data.options import KEYS_OF_SOURCE, DataConfig, DataSource
from rotexp.experiment.options import EvaluateConfig
from rotexp.models.options import ModelDtype
from rotexp.process.exit_codes import DONE
from rotexp.process.imports import uncollected
from rotexp.process.one_process import carry_out
from rotexp.process.outer import is_first
from rotexp.quant.options import QuantConfig
from rotexp.rotation.options import RotationConfig
from rotexp.runfolder.finished_run import FinishedRun, read_finished_run
from rotexp.sharding.options import ShardingConfig, SyncConfig
from rotexp.training.options import TrainConfig

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
    return carry_out(lambda: _evaluate(config, run, out), name="evaluation", left=lambda: "nothing was written")


def _evaluate(config: Config, run: FinishedRun | None, out: Path | None) -> None:
    with uncollected():
        from rotexp.experiment.evaluation import show_figures  # what imports torch, once the request is right

    show_figures(config, run, out)


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
    unset: dict[str, Any] = {key: None for keys in others for key in keys} | {"_target_": None, "options": {}}
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
