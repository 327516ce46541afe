"""What W&B calls a run: its name, tags and configuration, each a pure function of the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rotexp.tracking.limits import LONGEST_NAME, LONGEST_TAG
from rotexp.tracking.short_names import plain_text, shortened

NAMED_BY = {"sharding": "strategy", "sync_mode": "mode", "launch": "kind", "tracker": "kind"}
"""The groups without a field `name`, and the field that says which option was chosen."""

AXES = ("model", "quant", "rotation", "sharding", "sync_mode")
"""The groups that make a run's name, in this order, before its seed."""

TAGS = {"sharding": "sharding", "sync": "sync_mode", "quant": "quant", "rotation": "rotation"}
"""The kinds of tags, and the group each is the option of."""

LONGEST_FOLDER = 100
"""Characters of a folder's name within a run's."""


def option_name(plain: Mapping[str, Any], group: str) -> str:
    """Return the option that a configuration, as nested dicts, has of a group."""
    return str(plain[group][NAMED_BY.get(group, "name")])


def mirrored_config(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a field `name` in every group, to filter by.

    `sharding.by_model` names model and sharding together, for a panel groups its bars by one field alone.
    """
    named = {group: {"name": option_name(plain, group), **plain[group]} for group in NAMED_BY}
    named["tracker"]["name"] = plain["tracker"]["kind"] or "wandb"  # which nobody had to choose
    named["sharding"]["by_model"] = f"{_model_name(plain)} {named['sharding']['name']}"
    return {**plain, **named}


def axes_name(plain: Mapping[str, Any]) -> str:
    """Return a name made of what people compare, such as `tiny-w4a4-learned-full-off-seed0`."""
    return shortened(_axes(plain), LONGEST_NAME)


def _axes(plain: Mapping[str, Any]) -> str:
    options = (option_name(plain, group) for group in AXES[1:])
    parts = [_model_name(plain), *options, f"seed{plain['seed']}"]
    return "-".join(map(_plain_text, parts))


def place_in_group(folder: PurePath, group: str | None) -> str:
    """Return the path of a run's folder below the one that its group is called by, or else the folder's own name."""
    below = folder.parts[-1:]
    for parent in folder.parents:
        if parent.name and shortened(parent.name, LONGEST_NAME) == group:
            below = folder.relative_to(parent).parts
    return "/".join(below)


def display_name(plain: Mapping[str, Any], *, folder: str) -> str:
    """Return the name of a run that was given none.

    The jobs of a group may differ in more than the axes, so there the folder's name follows.

    Args:
        folder: the name of the run's folder.
    """
    suffix = f"-{shortened(_plain_text(folder), LONGEST_FOLDER)}"
    in_a_group = plain["tracker"].get("group")
    return _axes(plain)[: LONGEST_NAME - len(suffix)] + suffix if in_a_group else axes_name(plain)


def tags(plain: Mapping[str, Any]) -> list[str]:
    """Return the tags a user gave and those of the run's options (`sharding:full`), each once."""
    options = [f"{kind}:{option_name(plain, group)}" for kind, group in TAGS.items()]
    simulated = ["simulated"] if plain["sharding"].get("sim_world") else []
    given = plain["tracker"].get("tags", [])
    return list(dict.fromkeys([*given, *(shortened(tag, LONGEST_TAG) for tag in (*options, *simulated))]))


def artifact_name(run_id: str, *, kind: str) -> str:
    """Return the name of a run's artifact of a kind, of characters that W&B takes there."""
    return shortened(_plain_text(f"{kind}-{run_id}"), LONGEST_NAME)


def _model_name(plain: Mapping[str, Any]) -> str:
    """Return the model's option; for those that stand for many models, with its size or the end of its path."""
    model = plain["model"]
    detail = PurePath(model["path"] or "").name if model["name"] == "hf" else model["size"]
    return f"{model['name']}-{detail}" if detail else str(model["name"])


def _plain_text(text: str) -> str:
    """Return the text with every run of special characters as one `_`, none at its ends."""
    return plain_text(text, gap="_").strip("_")
