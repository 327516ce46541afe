"""The W&B workspace that compares runs: its panels, built without network, and how it is saved."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rotexp.tracking.limits import check_project
from rotexp.tracking.wandb import has_key

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace


def build_workspace(*, project: str, entity: str, name: str) -> Workspace:
    """Build the workspace of a project's runs; asks nobody.

    Raises:
        ValueError: the library is not installed, or no project has that name.
    """
    check_project(project, key="project")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of pydantic's, in the library itself
            from wandb_workspaces.workspaces import Workspace, WorkspaceSettings
    except ImportError:
        raise ValueError("wandb-workspaces is not installed; pip install 'rotexp[dashboard]'") from None
    sections = [_memory(), _correctness(), _quality(), _speed(), _comparison()]
    settings = WorkspaceSettings(max_runs=100)
    return Workspace(name=name, project=project, entity=entity, sections=sections, settings=settings)


def workspace_json(workspace: Workspace) -> str:
    """Return what W&B would be sent, as JSON."""
    view = workspace._to_model()
    return json.dumps(view.model_dump(mode="json", by_alias=True, exclude_none=True), indent=2) + "\n"


def save_workspace(workspace: Any) -> str:
    """Save a workspace at W&B, in the project of the user who is logged in if it names no entity.

    Args:
        workspace: of `build_workspace`.

    Returns:
        Its address.

    Raises:
        ValueError: nobody is logged in, or W&B refused it.
    """
    if not has_key():
        raise ValueError("not logged in to W&B, the workspace was not saved; run `wandb login`, or set WANDB_API_KEY")
    try:
        if not workspace.entity:
            import wandb

            workspace.entity = wandb.Api(timeout=30).default_entity or ""
        workspace.save()
    except Exception as error:  # whatever W&B and its transport raise
        raise ValueError(f"W&B did not take the workspace ({error}); check project and entity") from None
    return str(workspace.url)


def _section(name: str, panels: Sequence[Any]) -> Section:
    """Return an open section, its panels in two columns."""
    from wandb_workspaces.workspaces import Section, SectionLayoutSettings

    rows = -(-len(panels) // 2)
    return Section(
        name=name, panels=[*panels], is_open=True, layout_settings=SectionLayoutSettings(columns=2, rows=rows)
    )


def _memory() -> Section:
    from wandb_workspaces.reports.v2.interface import BarPlot, Config, SummaryMetric

    figures = {"peak_allocated": "allocated on the accelerator", "peak_rss": "resident"}
    panels = [
        BarPlot(
            title=f"peak memory {meaning} while training, by model and sharding",
            metrics=[SummaryMetric(f"memory.train.{figure}_gib_max")],
            title_x="GiB, the largest over ranks",
            groupby=Config("sharding.by_model"),
            groupby_aggfunc="max",
            max_bars_to_show=100,
        )
        for figure, meaning in figures.items()
    ]
    return _section("memory by sharding and model size", panels)


def _correctness() -> Section:
    from wandb_workspaces.reports.v2.interface import Config, LinePlot

    divergence = LinePlot(
        title="divergence of replicas, by sync mode (zero is not drawn)",
        y=["replica/max_abs_diff"],
        log_y=True,
        title_y="largest difference",
        groupby=Config("sync_mode.name"),
        groupby_aggfunc="max",
        groupby_rangefunc="minmax",
    )
    drift = LinePlot(
        title="drift off orthogonality",
        y=["rotation/orthogonality_rrt_max", "rotation/orthogonality_rtr_max"],
        log_y=True,
    )
    norms = [_over_steps(f"gradient norm, {part}", f"grad_norm/{part}") for part in ("total", "rotations", "weights")]
    return _section("correctness", [divergence, drift, *norms])


def _quality() -> Section:
    from wandb_workspaces.reports.v2.interface import ScatterPlot, SummaryMetric

    cost = ScatterPlot(
        title="perplexity against device-hours",
        x=SummaryMetric("train.device_hours"),
        y=SummaryMetric("evaluation.trained.perplexity"),
        log_x=True,
    )
    return _section("quality", [cost, _over_steps("loss (nats)", "train/loss")])


def _speed() -> Section:
    panels = {
        "tokens a second": "throughput/tokens_per_s",
        "tokens a second and device": "throughput/tokens_per_s_per_device",
        "model FLOPs utilization (%)": "throughput/mfu_pct",
        "seconds a step": "time/step_s",
        "seconds a step at the guard": "time/sync_s",
    }
    return _section("throughput", [_over_steps(title, key) for title, key in panels.items()])


def _comparison() -> Section:
    from wandb_workspaces.reports.v2.interface import RunComparer

    return _section("comparison of runs", [RunComparer(diff_only=True)])


def _over_steps(title: str, key: str) -> Any:
    from wandb_workspaces.reports.v2.interface import LinePlot

    return LinePlot(title=title, y=[key])
