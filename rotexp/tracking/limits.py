"""What W&B takes, in a configuration and in its own variables: checked before a run starts, lest the mirror be lost."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rotexp.errors.requirements import require
from rotexp.tracking.options import TrackerConfig, WandbMode

LONGEST_NAME, LONGEST_JOB_TYPE, LONGEST_TAG = 128, 64, 64
"""In characters: of projects, runs, groups and ids; of job types; of tags."""
NOT_IN_NAMES = "/\\#?%:\r\n"
"""Characters that neither a project nor an entity has, since both are parts of an address."""
NOT_IN_IDS = "/\\#?%:;,'\r\n"
ONLINE = ("online", "run", "shared")
"""The modes of W&B's own that need a key."""

NAMES = ("project", "entity", "run_name", "group", "job_type")
VARIABLES = {"entity": "WANDB_ENTITY", "group": "WANDB_RUN_GROUP"}
"""The variables that hold where the configuration names nothing; an empty one names nothing either."""
FILES = ("WANDB_IDENTITY_TOKEN_FILE", "WANDB_SWEEP_PARAM_PATH")
"""Variables with the path of a file that W&B reads even when it records offline."""
OWN_HISTORY = ("WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables that would join a run to another's history, against the one in the run's folder."""


def check_tracker(tracker: TrackerConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse what W&B would refuse, by its library at once or by its server later, if the run is mirrored.

    Raises:
        ValueError: one line with the key or the variable, its value and what is allowed.
    """
    if not tracker.mirrors_to_wandb:
        return
    for name in NAMES:
        _check_name(name, getattr(tracker, name), key=f"tracker.{name}")
    for name, variable in VARIABLES.items():
        if getattr(tracker, name) is None:
            _check_name(name, environment.get(variable) or None, key=variable)
    for tag in tracker.tags:
        _check_length(tag, LONGEST_TAG, key="tracker.tags", remedy="shorten it, or leave it out")
    _check_variables({name: value for name, value in environment.items() if name.startswith("WANDB_")})
    key, mode = environment.get("WANDB_API_KEY"), environment.get("WANDB_MODE") or "online"
    online = tracker.mode is WandbMode.online or (tracker.mode is WandbMode.auto and mode in ONLINE)
    if online and key and (fault := _fault_of_key(key)):
        raise ValueError(f"WANDB_API_KEY: W&B does not take it ({fault}); set the whole key, or unset it")


def check_sweep(trackers: Sequence[TrackerConfig], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a sweep whose jobs would all be one W&B run.

    Raises:
        ValueError: they would.
    """
    run_id = environment.get("WANDB_RUN_ID")
    if run_id is not None and any(tracker.mirrors_to_wandb for tracker in trackers):
        raise ValueError(f"WANDB_RUN_ID={run_id}: would make one W&B run of all jobs; unset it, or set tracker=jsonl")


def check_project(project: str, *, key: str) -> None:
    """Refuse a name that no project has.

    Raises:
        ValueError: it is one.
    """
    _check_name("project", project, key=key)


def _check_name(name: str, value: str | None, *, key: str) -> None:
    if value is None:
        return
    longest = LONGEST_JOB_TYPE if name == "job_type" else LONGEST_NAME
    _check_length(value, longest, key=key, remedy="shorten it, or leave it out")
    if name in ("project", "entity"):
        remedy = "choose another name"
        if name == "project" and value.count("/") == 1:
            entity, _, project = value.partition("/")
            remedy = f"set {key.replace('project', 'entity')}={entity} {key}={project}"
        _check_characters(value, NOT_IN_NAMES, key=key, remedy=remedy)


def _check_length(value: str, longest: int, *, key: str, remedy: str) -> None:
    shown = value if len(value) <= longest else f"{value[:20]}… ({len(value)} characters)"
    require(bool(value.strip()) and len(value) <= longest, key, shown, f"1 to {longest} characters, not blank", remedy)


def _check_characters(value: str, forbidden: str, *, key: str, remedy: str) -> None:
    visible = " ".join(forbidden.rstrip("\r\n"))
    require(not set(value) & set(forbidden), key, value, f"without {visible} and line ends", remedy)


def _check_variables(given: Mapping[str, str]) -> None:
    """Refuse variables that W&B's own library cannot read, or that its server would not take."""
    for name, value in given.items():
        require(name not in OWN_HISTORY, name, value, "unset: a run goes on with the W&B run of its folder", "unset it")
        if reason := _fault(name, value):
            shown = name if "KEY" in name or "TOKEN" in name else f"{name}={value}"
            raise ValueError(f"{shown}: W&B cannot read it ({reason}); change or unset it")
    if (run_id := given.get("WANDB_RUN_ID")) is not None:
        _check_length(run_id, LONGEST_NAME, key="WANDB_RUN_ID", remedy="choose another, or unset it")
        _check_characters(run_id, NOT_IN_IDS, key="WANDB_RUN_ID", remedy="choose another, or unset it")
    for name in FILES:
        if (path := given.get(name)) and not Path(path).is_file():
            raise ValueError(f"{name}={path}: no such file; change or unset it")
    if given.get("WANDB_RESUME") == "must" and run_id is None:
        raise ValueError("WANDB_RESUME=must: says not which run; set WANDB_RUN_ID too, or unset it")


def _fault(name: str, value: str) -> str:
    """Return why W&B's library cannot read a variable; empty if it can."""
    import wandb

    try:
        wandb.Settings().update_from_env_vars({name: value})
    except Exception as error:  # of pydantic's, or of its own
        told = getattr(error, "errors", None)  # without the value, which may be a secret
        return " ".join(str(told()[0]["msg"] if callable(told) else error).split())
    return ""


def _fault_of_key(key: str) -> str:
    """Return why W&B's own check refuses a key, without the key; empty if it takes it, or has no such check."""
    try:
        from wandb.sdk.lib.wbauth.validation import check_api_key
    except ImportError:  # of an earlier version, which says so when it is to be online
        return ""
    return (check_api_key(key) or "").rstrip(".")
