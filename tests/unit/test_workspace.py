"""The W&B workspace holds the panels the project is about, and is saved only by somebody who is logged in."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from rotexp.metrics.keys import check_keys
from rotexp.tracking.workspace import build_workspace, save_workspace, workspace_json

pytest.importorskip("wandb_workspaces.workspaces")


@pytest.fixture
def sections() -> dict[str, list[dict[str, Any]]]:
    """The panels by section, as W&B would be sent them."""
    view = json.loads(workspace_json(build_workspace(project="p", entity="e", name="n")))
    assert (view["project"], view["entity"], view["displayName"]) == ("p", "e", "n")
    listed = view["spec"]["section"]["panelBankConfig"]["sections"]
    assert all(section["isOpen"] for section in listed)
    return {section["name"]: section["panels"] for section in listed}


@pytest.fixture
def panels(sections: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [panel for section in sections.values() for panel in section]


def of_kind(panels: list[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    return (panel["config"] for panel in panels if panel["viewType"] == kind)


def test_memory_is_shown_by_model_and_sharding(panels: list[dict[str, Any]]) -> None:
    bars = list(of_kind(panels, "Bar Chart"))
    assert [bar["metrics"] for bar in bars] == [
        ["summary_metrics.memory.train.peak_allocated_gib_max"],
        ["summary_metrics.memory.train.peak_rss_gib_max"],
    ]
    assert {bar["groupBy"] for bar in bars} == {"sharding.value.by_model"}


def test_divergence_is_shown_by_sync_mode_on_a_log_axis(panels: list[dict[str, Any]]) -> None:
    lines = {line["metrics"][0]: line for line in of_kind(panels, "Run History Line Plot")}
    divergence = lines["replica/max_abs_diff"]
    assert (divergence["groupBy"], divergence["yLogScale"], divergence["xAxis"]) == (
        "sync_mode.value.name",
        True,
        "_step",
    )
    throughput = {"throughput/tokens_per_s", "throughput/mfu_pct"}
    assert {"grad_norm/total", "grad_norm/rotations", "train/loss"} | throughput <= lines.keys()
    check_keys(key for line in lines.values() for key in line["metrics"])  # every one is logged


def test_perplexity_is_shown_against_device_hours_and_runs_are_compared(panels: list[dict[str, Any]]) -> None:
    (scatter,) = of_kind(panels, "Scatter Plot")
    assert (scatter["xAxis"], scatter["yAxis"]) == (
        "summary:train.device_hours",
        "summary:evaluation.trained.perplexity",
    )
    (comparer,) = of_kind(panels, "Run Comparer")
    assert comparer["diffOnly"] is True


@pytest.fixture
def logged_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Somebody is logged in whose entity is `mine`; the workspaces that W&B is given."""
    from wandb_workspaces.workspaces import Workspace

    saved: list[Any] = []

    def save(workspace: Any) -> None:
        saved.append(workspace)

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(wandb, "Api", lambda **_: SimpleNamespace(default_entity="mine"))
    monkeypatch.setattr(Workspace, "save", save)
    monkeypatch.setattr(Workspace, "url", property(lambda workspace: f"at {workspace.entity}/{workspace.project}"))
    return saved


@pytest.mark.parametrize(("entity", "place"), [("e", "at e/p"), ("", "at mine/p")])
def test_it_is_saved_where_it_says_or_where_the_user_is_at_home(logged_in: list[Any], entity: str, place: str) -> None:
    workspace = build_workspace(project="p", entity=entity, name="n")
    assert save_workspace(workspace) == place
    assert logged_in == [workspace]


def test_what_wandb_says_is_passed_on_in_one_line(logged_in: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_workspace: Any) -> None:
        raise RuntimeError("permission denied")

    workspace = build_workspace(project="p", entity="e", name="n")
    monkeypatch.setattr(type(workspace), "save", refuse)
    with pytest.raises(ValueError, match=r"did not take the workspace \(permission denied\); check project and entity"):
        save_workspace(workspace)


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    with pytest.raises(ValueError, match=r"pip install 'rotexp\[dashboard\]'"):
        build_workspace(project="p", entity="e", name="n")
