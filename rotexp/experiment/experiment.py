"""One run on one rank: load, shard, baseline, prepare, hadamard, train, merge, evaluate, save."""

from __future__ import annotations

import os
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from rotexp.config.composition import config_digest, to_plain
from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.experiment.inputs import Inputs
from rotexp.experiment.measurements import Measurements
from rotexp.experiment.saving import origin, save_run_files
from rotexp.experiment.taking_over import TakenOver
from rotexp.metrics.flops import Utilization, utilization
from rotexp.metrics.profiler import StepProfiler
from rotexp.metrics.rotations import largest
from rotexp.metrics.static_memory import StaticBytes, predict
from rotexp.models.load import summarize_model
from rotexp.models.materialize import materialize
from rotexp.process.signals import StopRequest
from rotexp.rotation.building import build_for_run
from rotexp.rotation.invariance import PROOF_TOKENS, check_invariance, check_merged, trace
from rotexp.rotation.merge import merge, prepare
from rotexp.rotation.model import RotatedModel, start_from_file
from rotexp.rotation.trainable import start_scales
from rotexp.runfolder.records import finite, truncate_metrics, write_summary
from rotexp.sharding.communication import Communication
from rotexp.sharding.digest import weights_digest
from rotexp.sharding.guard import GuardCounts, UnshardGuard, install
from rotexp.sharding.options import Strategy
from rotexp.sharding.strategies import EffectiveSharding, precision_policy, shard
from rotexp.tracking.console import StartUp, TrainingProgress, profile_table, results_table, startup_panel
from rotexp.tracking.phases import Phases
from rotexp.tracking.summary import train_summary, versions
from rotexp.tracking.tracker import open_trackers
from rotexp.training.batches import tokens_per_step
from rotexp.training.coordinator import Coordinator
from rotexp.training.loop import train
from rotexp.training.options import Trainable, TrainConfig
from rotexp.training.saved_state import Checkpoints
from rotexp.training.state import TrainingState, TrainResult

PHASES = ("load", "shard", "baseline", "prepare", "hadamard", "train", "average", "save", "merge", "evaluate")


class Experiment:
    """The phases of one run, in their order, and what they leave for its summary."""

    def __init__(
        self, config: Config, inputs: Inputs, folder: Path, *, accelerator: Accelerator, stop: StopRequest | None = None
    ) -> None:
        self.config = config
        self.inputs = inputs
        self.folder = folder
        self.accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.communication = Communication(
            rank=accelerator.process_index, world_size=accelerator.num_processes, device=self.device
        )
        self.console = Console(quiet=not accelerator.is_main_process)
        self.stop = stop or StopRequest()
        self.resumed = TakenOver(inputs.beginning, config, protocol=inputs.protocol)
        self.step = self.resumed.step
        self.tracker = open_trackers(
            config,
            folder,
            plain_config=to_plain(config),
            rank=accelerator.process_index,
            run_id=self.resumed.run_id,
            logged_to=truncate_metrics(folder, self.step) if accelerator.is_main_process else -1,
        )
        steps = config.train.steps
        self.progress = TrainingProgress(self.console, steps=steps, done=self.step, phases=PHASES)
        self.phases = Phases(
            device=self.device,
            communication=self.communication,
            log=self.log,
            begin=self.progress.phase,
            before=self.resumed.phases,
        )
        self.summary: dict[str, Any] = {"status": "running", "error": None}
        self.guard: UnshardGuard | None = None
        self.static: StaticBytes | None = None
        self.utilization: Utilization | None = None
        self.measurements = Measurements(
            config,
            inputs,
            communication=self.communication,
            device=self.device,
            ranks_per_node=self.ranks_per_node,
            known=self.resumed.evaluation,
            log=self.log,
            say=self.say,
        )

    def run(self) -> None:
        """Run every phase; on rank 0 print the table and write the summary.

        Raises:
            PhaseError: a phase failed; trackers are closed as failed.
        """
        with self.progress, ExitStack() as on_failure:
            on_failure.push(self.close_failed)
            on_failure.callback(self.remove_guard)
            with self.phases("load"):
                model = self.load()
            with self.phases("shard"):
                self.shard(model)
            with self.phases("baseline"):
                self.measurements.as_it_comes(model)
            with self.phases("prepare"):
                self.prepare(model)
            with self.phases("hadamard"):
                self.measurements.start(model)
                if obstacle := self.measurements.hadamard(model):
                    self.console.print(obstacle, soft_wrap=True)
            with self.phases("train"):
                state = self.train(model)
            if state.ema is not None and state.step:
                with self.phases("average"):
                    self.measurements.average(model, state.ema)
            with self.phases("save"):
                facts = origin(self.config, self.inputs.checkpoint)
                save_run_files(self.folder, model, state, facts=facts, communication=self.communication)
            with self.phases("merge"):
                self.merge(model)
            with self.phases("evaluate"):
                self.measurements.trained(model)
            on_failure.pop_all()
            self.remove_guard()
        self.finish(state)

    def log(self, row: dict[str, float]) -> None:
        """Record metrics at the present step."""
        simulated = self.config.sharding.sim_world
        mark = {} if simulated is None else {"sharding/sim_world": float(simulated)}
        self.tracker.log(row | mark, step=self.step)

    def close_failed(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        """Let the trackers say how the run ended."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self.tracker.finish(self.summary | {"status": status, "error": str(error)}, exit_code=1)

    def say(self, text: str) -> None:
        """Tell people of something they may want to know."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Tell people of something they may not expect."""
        self.console.print(f"warning: {text}", style="yellow", highlight=False, soft_wrap=True)

    def load(self) -> RotatedModel:
        """Build the model's structure, without memory, with rotations and quantizers in place."""
        checkpoint, config = self.inputs.checkpoint, self.config
        for warning in self.inputs.warnings:
            self.warn(warning)
        if checkpoint.coarse:
            counts = ", ".join(f"{count} {grid}" for grid, count in checkpoint.coarse_counts().items())
            self.console.print(f"weights were stored on a coarse grid: {counts}", highlight=False, soft_wrap=True)
        return build_for_run(checkpoint, config, dtype=getattr(torch, config.model.dtype.name))

    def shard(self, model: RotatedModel) -> None:
        """Split the parameters over the ranks, read the weights, give every rank the same rotations."""
        effective = shard(
            model.network,
            self.config.sharding,
            units=model.units,
            ignored=model.unsharded,
            device_type=self.device.type,
            world_size=self.communication.world_size,
            ranks_per_node=self.ranks_per_node,
        )
        if self.config.sharding.strategy is Strategy.zero2_master and not self.config.train.params.weights:
            self.warn("sharding=zero2_master splits the master of trained weights, and none are trained: as no_shard")
        self.guard = install(model.network, self.config.sync_mode, name=self.inputs.checkpoint.identity)
        materialize(
            model.network,
            self.inputs.checkpoint,
            device=self.device,
            added=model.added,
            compute_dtype=self.compute_dtype,
            communication=self.communication,
        )
        self.inputs.checkpoint.weights.release()
        replaced = start_from_file(model, self.config.rotation, identity=self.inputs.checkpoint.identity)
        for name, error in replaced.items():
            self.warn(f"{name} was {error:.1e} from orthogonal in {self.config.rotation.path}; the nearest is used")
        model.keep_codes(not self.config.sharding.strategy.reshards_after_forward)
        Coordinator(model.network, self.communication).broadcast()
        if self.config.train.steps:
            ignored = model.unsharded
            self.base = weights_digest(model.network, communication=self.communication, ignored=ignored)
        self.summary["sharding"] = {"strategy": self.config.sharding.strategy.name, "effective": asdict(effective)}
        self.console.print(startup_panel(self.start_up(model, effective)))
        if self.config.train.steps:
            self.static = predict(
                model,
                self.config,
                world_size=self.communication.world_size,
                rank=self.communication.rank,
                ranks_per_node=self.ranks_per_node,
                device_type=self.device.type,
            )
            self.console.print(self.static.line(), highlight=False, soft_wrap=True)
        if self.guard is not None:
            self.say(self.guard.line(self.inputs.checkpoint.identity, self.config.sync_mode))

    def start_up(self, model: RotatedModel, effective: EffectiveSharding) -> StartUp:
        """Return what a person wants to know before the run has cost anything."""
        ours = model.unsharded
        simulated = self.config.sharding.sim_world
        mark = "" if simulated is None else f", as rank 0 of a simulated world of {simulated}: not a real training"
        return StartUp(
            model=self.inputs.checkpoint.identity,
            parameters=sum(weight.numel() for weight in model.network.parameters() if weight not in ours),
            sharding=f"{self.config.sharding.strategy.name}: {effective.line()}{mark}",
            devices=f"{self.communication.world_size} x {self.device.type}",
            tokens_per_step=self.tokens_per_step,
            steps=self.config.train.steps - self.step,
            folder=self.folder,
            step_seconds=self.resumed.step_seconds,
        )

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks share this node, where the launcher says so."""
        return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None

    def prepare(self, model: RotatedModel) -> None:
        """Fold norms, bake online transforms, and prove that the float model is what it was."""
        for warning in model.warnings:
            self.warn(warning)
        self.original = trace(model, self.proof_tokens, rotate=False)
        with self.communication.equal_threads():  # lest replicas of what is baked differ in their last bits
            prepare(model)
        prepared = trace(model, self.proof_tokens, rotate=True)
        error = check_invariance(self.original, prepared, layers=model.spec.layers, dtype=self.compute_dtype)
        self.log({"eval/invariance": error})
        self.console.print(f"invariance: relative logit error {error:.1e}", highlight=False)

    @property
    def proof_tokens(self) -> Tensor:
        """Token ids (1, tokens) that the invariance proofs run on."""
        return torch.from_numpy(self.inputs.calibration[:1, :PROOF_TOKENS]).to(self.device)

    @property
    def compute_dtype(self) -> torch.dtype:
        """What the model computes in."""
        held: torch.dtype = getattr(torch, self.config.model.dtype.name)
        return precision_policy(self.config.sharding).param_dtype or held

    def warn_of_clipping(self) -> None:
        """Say that a norm to clip to was set which changes nothing."""
        train, optimizer = self.config.train, self.config.optimizer
        acts = optimizer.uses_gradient_length or train.params is not Trainable.rotations
        if not acts and train.max_grad_norm not in (None, TrainConfig.max_grad_norm):
            self.warn(
                f"train.max_grad_norm={train.max_grad_norm} changes nothing: a step of "
                f"optimizer.step_rule={optimizer.step_rule.name} without momentum is as long for any gradient; "
                "optimizer.lr sets its angle"
            )

    def train(self, model: RotatedModel) -> TrainingState:
        """Train what is to be trained, from the first step or a checkpoint's on."""
        config = self.config
        start_scales(model)
        for ratios in model.scales.parameters() if model.scales is not None else ():
            self.communication.broadcast_(ratios.detach())
        state = TrainingState(model, config, communication=self.communication)
        coordinator = Coordinator(model.network, self.communication)
        if not config.train.steps or not state.trains:
            state.conclude(coordinator.divergence())
            return state
        self.warn_of_clipping()
        if build(config.objective).distills:
            self.measurements.load_teacher()
        for note in self.resumed.load(state, base=self.base, communication=self.communication):  # random states last
            self.console.print(f"resume: {note}", highlight=False, soft_wrap=True)
        checkpoints = Checkpoints(
            self.folder,
            keep=config.train.keep_checkpoints,
            asynchronous=config.train.async_checkpoints,
            communication=self.communication,
        )

        def save() -> None:
            if config.sharding.sim_world is None:
                checkpoints.save(state.step, state.tensors(), facts=self.facts(state))

        def log(step: int, row: dict[str, float]) -> None:
            self.step = step
            row |= {f"memory/{figure}": value for figure, value in self.phases.spread().items()}
            self.log(row)
            if step:
                self.progress.show(step, row)

        profiler = self.profiler(config.train.steps - state.step)
        self.utilization = self.find_utilization(model)
        with profiler or nullcontext(), checkpoints.completed(self.stop):
            train(
                state,
                self.inputs.calibration,
                config,
                accelerator=self.accelerator,
                communication=self.communication,
                teacher=self.measurements.teacher,
                log=log,
                save=save,
                held_out_loss=lambda: self.measurements.held_out_loss(model),
                stop=self.stop,
                guard=self.guard,
                profiler=profiler,
                utilization=self.utilization,
            )
        if profiler is not None:
            self.console.print(profile_table(profiler.figures, num_steps=profiler.num_steps))
        return state

    def facts(self, state: TrainingState) -> dict[str, Any]:
        """Return what a checkpoint of this run holds beside tensors."""
        facts = {
            "state": state.facts(),
            "phases": self.phases.so_far(),
            "evaluation": self.measurements.rows,
            "config": to_plain(self.config),
            "base": {"model": self.inputs.checkpoint.identity, "digest": self.base},
            "tracker": {"run_id": self.tracker.run_id},
            "versions": versions(),
        }
        kept: dict[str, Any] = finite(facts)
        return kept

    def profiler(self, steps: int) -> StepProfiler | None:
        """Return what profiles the steps, if that is asked for."""
        if not self.config.profile:
            return None
        return StepProfiler(self.folder, rank=self.communication.rank, steps=steps)

    def find_utilization(self, model: RotatedModel) -> Utilization:
        """Return how a device's speed becomes its utilization, and say so where that cannot be known."""
        found = utilization(
            model,
            tokens=self.config.data.sequence_length,
            weights_trained=self.config.train.params is Trainable.all,
            device=self.device,
            dtype=self.compute_dtype,
        )
        if found.peak is None and self.device.type != "cpu":
            device = f"{torch.cuda.get_device_name(self.device)} in {self.compute_dtype}"
            self.warn(f"no throughput/mfu_pct: the peak of {device} is not known to rotexp/metrics/flops.py")
        return found

    def throughput(self, result: TrainResult) -> dict[str, float]:
        """Return the speed of the whole training, and the utilization that it comes to."""
        tokens_per_s = self.tokens_per_step * len(result.losses) / max(result.seconds, 1e-9)
        by_device = tokens_per_s / self.communication.world_size
        return {"tokens_per_s": tokens_per_s} | (self.utilization.figures(by_device) if self.utilization else {})

    def merge(self, model: RotatedModel) -> None:
        """Bake the rotations into the weights, and prove that the float model is what it was."""
        before = self.original
        if self.config.train.params.weights:
            before = trace(model, self.proof_tokens, rotate=True)
        merge(model)
        check_merged(before, model, self.proof_tokens, dtype=self.compute_dtype)

    def finish(self, state: TrainingState) -> None:
        """Complete the summary, close the trackers, print what the run found."""
        result = state.result
        simulated = self.config.sharding.sim_world
        self.summary |= {
            "status": "done",
            "world_size": self.communication.world_size,
            "model": summarize_model(self.config.model, self.inputs.checkpoint),
            "train": train_summary(result, self.measurements.rows, world_size=self.communication.world_size)
            | ({} if state.master is None else {"num_spills": state.master.num_spills}),
            "evaluation": self.measurements.rows,
            "memory": self.phases.memory,
            "static_bytes": self.static.by_kind() if self.static else None,
            "throughput": self.throughput(result),
            "time": self.phases.seconds,
            "replica": {"max_abs_diff": result.divergence.max_abs_diff},
            "rotations": result.rotations,
            "rotation": largest(result.rotations),
            "sync": self.sync_summary(),
            "versions": versions(),
            "config_digest": config_digest(self.config),
        } | ({} if simulated is None else {"simulated_world": simulated})
        self.tracker.finish(self.summary, exit_code=0)
        if self.accelerator.is_main_process:
            write_summary(self.folder, self.summary)
            quant, rotation = self.config.quant.name, self.config.rotation.name
            title = f"{self.inputs.checkpoint.identity}, quant={quant}, rotation={rotation}"
            title += "" if simulated is None else f" (rank 0 of a simulated world of {simulated}: not a real training)"
            self.console.print(results_table(self.measurements.rows, title=title, trained=bool(result.losses)))
            self.console.print(f"run folder: {self.folder}", highlight=False, soft_wrap=True)

    def remove_guard(self) -> None:
        """Leave torch's classes as they were."""
        if self.guard is not None:
            self.guard.remove()

    def sync_summary(self) -> dict[str, Any]:
        """Return what the guard did over the whole run."""
        counts = self.guard.counts if self.guard else GuardCounts()
        return {
            "mode": self.config.sync_mode.mode.name,
            "num_groups": self.guard.num_groups if self.guard else 0,
            "groups": dict(self.guard.groups) if self.guard else {},
            "num_unshards": dict(counts.unshards),
            "num_barriers": counts.barriers,
            "seconds": counts.seconds,
        }

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one step over all ranks that exist."""
        return tokens_per_step(self.config, world_size=self.communication.world_size)
