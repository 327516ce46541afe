"""What W&B would not take is refused in one line, by key or variable, before a run starts."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rotexp.tracking.limits import check_sweep, check_tracker
from rotexp.tracking.options import TrackerConfig, TrackerKind, WandbMode
from rotexp.tracking.workspace import build_workspace
from rotexp.train import main

LENGTH = "must be 1 to {} characters, not blank; shorten it, or leave it out"
FORBIDDEN = "must be without / \\ # ? % : and line ends"

CONFIGURED: list[tuple[dict[str, Any], str]] = [
    ({"job_type": "x" * 65}, f"tracker.job_type={'x' * 20}… (65 characters): {LENGTH.format(64)}"),
    ({"job_type": ""}, f"tracker.job_type=: {LENGTH.format(64)}"),
    ({"run_name": "x" * 129}, f"tracker.run_name={'x' * 20}… (129 characters): {LENGTH.format(128)}"),
    ({"run_name": " "}, f"tracker.run_name= : {LENGTH.format(128)}"),
    ({"group": "x" * 129}, f"tracker.group={'x' * 20}… (129 characters): {LENGTH.format(128)}"),
    ({"group": ""}, f"tracker.group=: {LENGTH.format(128)}"),
    ({"project": "x" * 129}, f"tracker.project={'x' * 20}… (129 characters): {LENGTH.format(128)}"),
    ({"project": ""}, f"tracker.project=: {LENGTH.format(128)}"),
    ({"project": "team/x"}, f"tracker.project=team/x: {FORBIDDEN}; set tracker.entity=team tracker.project=x"),
    ({"project": "50%"}, f"tracker.project=50%: {FORBIDDEN}; choose another name"),
    ({"project": "a:b"}, f"tracker.project=a:b: {FORBIDDEN}; choose another name"),
    ({"entity": "team/x"}, f"tracker.entity=team/x: {FORBIDDEN}; choose another name"),
    ({"entity": ""}, f"tracker.entity=: {LENGTH.format(128)}"),
    ({"tags": ["a", ""]}, f"tracker.tags=: {LENGTH.format(64)}"),
    ({"tags": ["  "]}, f"tracker.tags=  : {LENGTH.format(64)}"),
    ({"tags": ["x" * 65]}, f"tracker.tags={'x' * 20}… (65 characters): {LENGTH.format(64)}"),
]


@pytest.mark.parametrize(("options", "line"), CONFIGURED)
def test_a_value_of_the_configuration_is_refused_by_its_key(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as end:  # noqa: PT011 (the whole line is compared)
        check_tracker(TrackerConfig(**options), {})
    assert str(end.value) == line
    for unseen in ({"kind": TrackerKind.jsonl}, {"mode": WandbMode.disabled}):
        check_tracker(replace(TrackerConfig(**options), **unseen), {"WANDB_MODE": "garbage"})


def test_what_wandb_takes_is_taken_to_the_last_character() -> None:
    names = {"project": "p" * 128, "entity": "e", "run_name": "my run, 1/2" + "r" * 117, "group": "g" * 128}
    check_tracker(TrackerConfig(**names, job_type="j" * 64, tags=["t" * 64, "a/b"]), {})


VARIABLES = {
    "WANDB_MODE=garbage": "W&B cannot read it (Input should be 'online', 'offline', ",
    "WANDB_PROJECT=team/x": "W&B cannot read it (Invalid project name 'team/x': cannot contain characters",
    "WANDB_ENTITY=a/b": "must be without / ",
    f"WANDB_RUN_GROUP={'g' * 129}": "must be 1 to 128 characters",
    "WANDB_TAGS=a,,b": "W&B cannot read it (Value error, Tag at index 1 is empty",
    f"WANDB_TAGS={'t' * 65}": "W&B cannot read it (Value error, Tag ",
    "WANDB_RUN_ID=a/b": "W&B cannot read it (Run ID cannot contain the characters",
    "WANDB_RUN_ID=a%b": "must be without / ",
    "WANDB_RUN_ID=": "W&B cannot read it (Run ID cannot be empty)",
    f"WANDB_RUN_ID={'i' * 129}": "must be 1 to 128 characters",
    "WANDB_RESUME=perhaps": "W&B cannot read it (Input should be 'allow', 'must', 'never' or 'auto')",
    "WANDB_RESUME=must": "says not which run; set WANDB_RUN_ID too",
    "WANDB_RESUME_FROM=abc?_step=1": "must be unset: a run goes on with the W&B run of its folder",
    "WANDB_FORK_FROM=abc?_step=1": "must be unset: a run goes on with the W&B run of its folder",
    "WANDB_BASE_URL=nowhere": "W&B cannot read it (Input should be a valid URL",
    "WANDB_BASE_URL=https://wandb.ai": "W&B cannot read it (Value error, https://wandb.ai is not a valid server",
    "WANDB_SILENT=maybe": "W&B cannot read it (Input should be a valid boolean",
    "WANDB_SWEEP_PARAM_PATH=/nowhere/it": "no such file; change or unset it",
    "WANDB_IDENTITY_TOKEN_FILE=/nowhere/it": "no such file; change or unset it",
    "WANDB_INIT_TIMEOUT=soon": "W&B cannot read it (Input should be a valid number",
}


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_is_refused_by_its_name(variable: str) -> None:
    name, _, value = variable.partition("=")
    with pytest.raises(ValueError) as end:  # noqa: PT011 (the line is compared)
        check_tracker(TrackerConfig(mode=WandbMode.offline), {name: value, "HOME": "/"})
    line = str(end.value)
    assert line.startswith(f"{name}=")
    assert VARIABLES[variable] in line
    assert "\n" not in line


@pytest.mark.parametrize("key", ["abc", " " + "x" * 40, "local-abc"])
def test_a_key_that_is_none_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ValueError, match=r"^WANDB_API_KEY: ") as end:
        check_tracker(TrackerConfig(mode=WandbMode.online), {"WANDB_API_KEY": key})
    assert key not in str(end.value)


def test_what_people_export_is_taken() -> None:
    usual = {"WANDB_MODE": "offline", "WANDB_API_KEY": "dummy", "WANDB_SILENT": "true", "WANDB_RUN_ID": "abc-1"}
    check_tracker(TrackerConfig(), usual | {"WANDB_RESUME": "allow", "WANDB_TAGS": "a,b", "WANDB_DISABLED": "x"})
    for key in ("x" * 40, "local-" + "x" * 40, "local-" + "x" * 20 + "-" + "x" * 20, "header.payload.signature"):
        check_tracker(TrackerConfig(mode=WandbMode.online), {"WANDB_API_KEY": key})


@pytest.mark.parametrize("name", ["WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_JOB_TYPE", "WANDB_PROJECT"])
def test_an_empty_variable_names_nothing(name: str) -> None:
    check_tracker(TrackerConfig(), {name: ""})


def test_a_variable_that_the_configuration_overrides_is_not_judged() -> None:
    check_tracker(TrackerConfig(), {"WANDB_NAME": "n" * 129, "WANDB_JOB_TYPE": "j" * 65})
    named = {"WANDB_ENTITY": "a/b", "WANDB_RUN_GROUP": "g" * 129}
    check_tracker(TrackerConfig(entity="mine", group="sweep"), named)


def test_only_sweeps_that_are_mirrored_need_a_run_id_of_each_job() -> None:
    exported = {"WANDB_RUN_ID": "abc"}
    with pytest.raises(ValueError, match="WANDB_RUN_ID=abc: would make one W&B run of all jobs; unset it"):
        check_sweep([TrackerConfig(kind=TrackerKind.jsonl), TrackerConfig()], exported)
    check_sweep([TrackerConfig(kind=TrackerKind.jsonl)], exported)
    check_sweep([TrackerConfig()], {})


def test_a_run_is_refused_before_anything_is_made(
    own_logging: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setenv("WANDB_MODE", "garbage")
    for argument, named in ((f"tracker.job_type={'x' * 65}", "tracker.job_type="), ("seed=1", "WANDB_MODE=garbage: ")):
        monkeypatch.setattr(sys, "argv", ["rotexp.train", argument, f"hydra.run.dir={folder}"])
        with pytest.raises(SystemExit) as end:
            main()
        errors = capsys.readouterr().err
        assert (end.value.code, errors.count("\n"), folder.exists()) == (2, 1, False)
        assert errors.startswith(f"rotexp: {named}")


def test_a_workspace_is_of_a_project_that_may_exist() -> None:
    pytest.importorskip("wandb_workspaces")
    with pytest.raises(ValueError, match=r"project=team/x: must be without / .*; set entity=team project=x"):
        build_workspace(project="team/x", entity="", name="name")
