"""One run on one rank: its phases, in their order."""

from __future__ import annotations

from contextlib import ExitStack

from rotexp.experiment.context import Context
from rotexp.experiment.loading import load_model, shard_model
from rotexp.experiment.proving import merge_model, prepare_model
from rotexp.experiment.saving import origin, save_run_files
from rotexp.experiment.shared_rows import share_rows
from rotexp.experiment.summing_up import sum_up
from rotexp.experiment.training_phase import train_model


def run_experiment(context: Context) -> None:
    """Run every phase; on rank 0 print the table and write the summary.

    Raises:
        PhaseError: a phase failed; trackers are closed as failed.
        Interrupted: a signal ended the run.
    """
    phase, measurements = context.phases, context.measurements
    with context.progress, context.record.closed_if_failed(), ExitStack() as at_end:
        with phase("load"):
            model = load_model(context)
        with phase("shard"):
            sharded = shard_model(context, model, at_end)
        with phase("baseline"):
            share_rows(context, model, weights=sharded.weights)
            measurements.as_it_comes(model)
        with phase("prepare"):
            original = prepare_model(context, model)
        with phase("hadamard"):
            measurements.start(model)
            measurements.hadamard(model)
        with phase("train"):
            trained = train_model(context, model, sharded)
        state = trained.state
        if state.ema is not None and state.step:
            with phase("average"):
                measurements.average(model, state.ema)
        with phase("save"):
            facts = origin(context.config, context.inputs.checkpoint)
            save_run_files(context.folder, model, state, facts=facts, communication=context.communication)
        with phase("merge"):
            merge_model(context, model, original)
        with phase("evaluate"):
            measurements.trained(model)
    sum_up(context, sharded, trained)
