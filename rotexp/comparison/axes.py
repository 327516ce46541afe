"""What differs between runs: the axes of a comparison, by the names people type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rotexp.comparison.runs import Run
from rotexp.config.schema import RECORDING

HEADS = {
    "sharding": "sharding.strategy",
    "sync_mode": "sync_mode.mode",
    "numerics": "numerics.mode",
    "launch": "launch.kind",
}
"""The key that says which option of a group was chosen, where it is not `<group>.name`."""

SEED = "seed"
ABSENT = ""


@dataclass(frozen=True)
class Axis:
    """A configuration key whose values differ; `label` is what one types to set it."""

    key: str
    label: str

    def of(self, run: Run) -> str:
        """Return a run's value as text, empty where neither its configuration nor its sweep says it."""
        return value_text(run.config, self.key) or run.axes.get(self.label, ABSENT)


def value_text(config: dict[str, Any], key: str) -> str:
    """Return a value as one types it, empty where there is none."""
    if key not in config:
        return ABSENT
    value = config[key]
    return value if isinstance(value, str) else json.dumps(value)


def find_axes(runs: Sequence[Run]) -> list[Axis]:
    """Return the axes, groups by their option's name.

    A key of a group is an axis only if it differs between runs that chose the same option: what an option sets is said
    by its name, and so is the class of an option; that of a part within one, such as quant.weights, is not.
    """
    configs = [run.config for run in runs if run.config]
    axes = []
    for key in differing_keys(configs):
        group = key.partition(".")[0]
        head = HEADS.get(group, f"{group}.name")
        if key.startswith(RECORDING) or key == f"{group}._target_":
            continue
        if key == head or _differs_within(configs, key, head):
            axes.append(Axis(key, group if key == head else key))
    return sorted(axes, key=lambda axis: axis.key == SEED)


def differing_keys(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys whose values are not the same in all configurations, in their order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({value_text(config, key) for config in configs}) > 1]


def _differs_within(configs: Sequence[dict[str, Any]], key: str, head: str) -> bool:
    values: dict[str, set[str]] = {}
    for config in configs:
        values.setdefault(value_text(config, head), set()).add(value_text(config, key))
    return any(len(found) > 1 for found in values.values())


def setting(run: Run, axes: Sequence[Axis]) -> str:
    """Return what a run shares with those that differ from it by the seed alone."""
    if not run.config and not run.axes:
        return f"{run.name} (configuration unknown)"
    given = {axis.label: axis.of(run) for axis in axes if axis.key != SEED}
    return ", ".join(f"{label}={value}" for label, value in given.items() if value) or "the one setting"
