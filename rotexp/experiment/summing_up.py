"""How a run that is done is summed up: `summary.json`, the trackers' end state, the table of results."""

from __future__ import annotations

from typing import Any

from rotexp.config.composition import config_digest
from rotexp.experiment.context import Context
from rotexp.experiment.loading import Sharded
from rotexp.experiment.training_phase import Trained
from rotexp.metrics.rotations import largest
from rotexp.models.load import summarize_model
from rotexp.runfolder.bits import rotations_digest
from rotexp.runfolder.layout import ROTATIONS_FILE
from rotexp.runfolder.records import write_summary
from rotexp.sharding.guard import GuardCounts, UnshardGuard
from rotexp.tracking.console import results_table
from rotexp.tracking.machine import machine
from rotexp.tracking.summary import train_summary, versions
from rotexp.training.batches import tokens_per_step


def sum_up(context: Context, sharded: Sharded, trained: Trained) -> None:
    """Complete the summary, close the trackers, print what the run found."""
    context.record.finish(_facts(context, sharded, trained))
    if context.accelerator.is_main_process:
        write_summary(context.folder, context.record.summary)
    context.messages.show(_table(context, trained))
    context.messages.say(f"run folder: {context.folder}")


def _facts(context: Context, sharded: Sharded, trained: Trained) -> dict[str, Any]:
    """Return what the summary of a run says, beside its sharding."""
    config, result = context.config, trained.state.result
    master, simulated = trained.state.master, config.sharding.sim_world
    rows, world_size = context.measurements.rows, context.communication.world_size
    rotations = context.folder / ROTATIONS_FILE
    return {
        "status": "done",
        "world_size": world_size,
        "model": summarize_model(config.model, context.inputs.checkpoint) | {"digest": sharded.weights},
        "train": train_summary(result, rows, world_size=world_size)
        | ({} if master is None else {"num_spills": master.num_spills}),
        "evaluation": rows,
        "evaluation_seconds": context.measurements.seconds,
        "memory": context.phases.memory,
        "static_bytes": sharded.static.by_kind() if sharded.static else None,
        "throughput": _throughput(context, trained),
        "time": context.phases.seconds,
        "replica": {"max_abs_diff": result.divergence.max_abs_diff},
        "rotations": result.rotations,
        "rotations_digest": rotations_digest(rotations) if context.accelerator.is_main_process else None,
        "rotation": largest(result.rotations),
        "sync": _sync(context, sharded.guard),
        "versions": versions(),
        "machine": machine(),
        "config_digest": config_digest(config),
    } | ({} if simulated is None else {"simulated_world": simulated})


def _throughput(context: Context, trained: Trained) -> dict[str, float]:
    """Return the speed of the whole training, and the utilization that it comes to."""
    result, world_size = trained.state.result, context.communication.world_size
    tokens = tokens_per_step(context.config, world_size=world_size) * len(result.losses)
    tokens_per_s = tokens / max(result.seconds, 1e-9)
    figures = trained.utilization.figures(tokens_per_s / world_size) if trained.utilization else {}
    return {"tokens_per_s": tokens_per_s} | figures


def _sync(context: Context, guard: UnshardGuard | None) -> dict[str, Any]:
    """Return what the guard did over the whole run."""
    counts = guard.counts if guard else GuardCounts()
    return {
        "mode": context.config.sync_mode.mode.name,
        "num_groups": guard.num_groups if guard else 0,
        "groups": dict(guard.groups) if guard else {},
        "num_unshards": dict(counts.unshards),
        "num_barriers": counts.barriers,
        "seconds": counts.seconds,
    }


def _table(context: Context, trained: Trained) -> Any:
    """Return the table of results."""
    config, simulated = context.config, context.config.sharding.sim_world
    title = f"{context.inputs.checkpoint.identity}, quant={config.quant.name}, rotation={config.rotation.name}"
    title += "" if simulated is None else f" (rank 0 of a simulated world of {simulated}: not a real training)"
    measurements = context.measurements
    return results_table(
        measurements.rows, title=title, trained=bool(trained.state.result.losses), seconds=measurements.seconds
    )
