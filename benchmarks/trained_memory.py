"""What ranks hold when all parameters are trained, against closed forms: `python -m benchmarks.trained_memory`."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks import facts
from benchmarks.variants import QUANTIZERS, RANDOM_SIZES
from rotexp.config.components import Component
from rotexp.config.schema import Config
from rotexp.config.targets import build
from rotexp.metrics.memory import GIB, peaks, reset_peaks
from rotexp.metrics.static_memory import StaticBytes, predict
from rotexp.models.load import open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.options import ModelConfig, ModelDtype, ModelSource
from rotexp.models.stored_model import StoredModel
from rotexp.optim.options import CayleySGDConfig
from rotexp.rotation.building import build_for_run
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.own_rows.division import Division, dividing, may_divide
from rotexp.rotation.trainable import start_scales
from rotexp.sharding.applying import shard
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import local_rows
from rotexp.sharding.options import ShardingConfig
from rotexp.sharding.strategies import STRATEGIES, strategy_of
from rotexp.training.coordinator import Coordinator
from rotexp.training.objectives import Teacher
from rotexp.training.options import EMAConfig, Trainable, TrainConfig
from rotexp.training.state import TrainingState
from rotexp.training.teacher import load_teacher

CPU = torch.device("cpu")
STEPS = 2
"""The first makes what is made once, the second is measured."""

LOOKS, PAUSE_SECONDS = 5, 0.03
MIB = 2**20
KINDS = {
    "weights": ("weights", "heads"),
    "gradients": ("gradients",),
    "master": ("master",),
    "moments": ("moments",),
    "shadows": ("shadows",),
    "bank": ("bank", "bank_gradients"),
    "best": ("best",),
}
"""The columns of the table, and the kinds that each adds up; the rest is small."""


def settled_bytes() -> int:
    """Return `live_bytes` without what another thread is about to let go, as gloo's do with what they have sent."""
    looks = []
    for _ in range(LOOKS):
        looks.append(live_bytes())
        time.sleep(PAUSE_SECONDS)
    return min(looks)


def live_bytes() -> int:
    """Return the bytes of every storage to which a tensor of this process refers, each storage once.

    Nothing is told to it: it goes through all Python objects but frozen ones, and gradients that only autograd holds.
    """
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    tensors += [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    storages = [local_rows(tensor).untyped_storage() for tensor in tensors if not tensor.is_meta]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclasses.dataclass(frozen=True)
class MemoryRequest:
    """One world to measure, in which every rank trains on one block."""

    strategy: str
    model: str = "135m"
    dtype: str = "float32"
    tokens: int = 64
    ema_decay: float | None = 0.99

    def config(self) -> Config:
        """Return the run that is measured."""
        return Config(
            model=ModelConfig("random_llama", ModelSource.random, size=self.model, dtype=ModelDtype[self.dtype]),
            quant=QUANTIZERS["w4a4"],
            rotation=RotationConfig("learned", r1=True, r2=True),
            optimizer=CayleySGDConfig(),
            objective=Component("ce", "rotexp.training.objectives.CrossEntropy"),
            train=TrainConfig(steps=STEPS, params=Trainable.all),
            ema=EMAConfig(self.ema_decay),
            sharding=ShardingConfig(self.strategy),
        )


def measure_world(request: MemoryRequest, *, world_size: int) -> list[dict[str, Any]]:
    """Return what every rank of a world found, each a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        spawn(_be_rank, (request, world_size, Path(place)), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [facts.read_json(_result(Path(place), rank)) for rank in range(world_size)]


def _be_rank(rank: int, request: MemoryRequest, world_size: int, place: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{place / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    config = request.config()
    checkpoint = open_checkpoint(config.model, seed=config.seed)
    figures = measure_rank(checkpoint, config, tokens=request.tokens)
    facts.write_json(_result(place, rank), figures)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a finalizing interpreter ends the group's threads in the middle of C++, which aborts (Python < 3.14)


def _result(place: Path, rank: int) -> Path:
    return place / f"rank-{rank}.json"


def measure_rank(checkpoint: StoredModel, config: Config, *, tokens: int) -> dict[str, Any]:
    """Train as a run does, on one block of random tokens, and compare what this rank holds with the closed forms.

    Returns:
        For each moment, `predicted` from the model before it had memory, and `measured`: `backward` (gradients are as
        it left them, with those that rotations of divided weights alone have yet to get), `ready` (they are reduced, to
        step by), `between` (the step is done) and `gathered` (after a forward without gradients). `kinds` of the
        prediction, `num_trained` tensors of AdamW, and the resident peak of the last step. Measured bytes are without
        the batch and what describes the mesh.
    """
    communication = Communication(rank=dist.get_rank(), world_size=dist.get_world_size())
    token_ids = torch.randint(checkpoint.config.vocab_size, (1, tokens))
    gc.collect()
    gc.freeze()  # what there is already is not looked through again and again
    model = _build(checkpoint, config)
    predicted = predict(model, config, world_size=communication.world_size, rank=communication.rank)
    before = live_bytes()
    _shard(model, config, communication)
    mesh = settled_bytes() - before
    state, teacher = _prepare(model, checkpoint, config, communication)
    mesh *= 1 if teacher is None else 2  # the teacher lies on one of its own
    coordinator = Coordinator(model.network, communication, master=state.master)
    frozen = may_divide(config, distills=build(config.objective).distills)
    with dividing(model, config.sharding, communication=communication, frozen=frozen) as division:
        for _ in range(STEPS):
            reset_peaks(CPU)
            measured = _step(state, division, coordinator, config, token_ids, teacher)
        figures = peaks(CPU)
        with torch.no_grad():
            model.logits(token_ids)
        measured["gathered"] = settled_bytes()
    return {
        "predicted": moments(predicted),
        "measured": {moment: held - mesh for moment, held in measured.items()},
        "kinds": predicted.by_kind(),
        "num_trained": len(state.optimizers.weights.state) if state.optimizers.weights else 0,
        **figures,
    }


def moments(predicted: StaticBytes) -> dict[str, int]:
    """Return what a rank holds, with its host memory, at each moment that `measure_rank` looks at."""
    moved = predicted.gradients if predicted.master else 0
    held = {
        "backward": predicted.total - predicted.shard_gradient,
        "ready": predicted.total - moved - predicted.divided_codes,
        "between": predicted.between_steps,
        "gathered": predicted.between_steps + predicted.gathered,
    }
    return {moment: size + predicted.best for moment, size in held.items()}


def _build(checkpoint: StoredModel, config: Config) -> RotatedModel:
    return build_for_run(checkpoint, config, dtype=getattr(torch, config.model.dtype.name))


def _shard(model: RotatedModel, config: Config, communication: Communication) -> None:
    shard(
        model.network,
        config.sharding,
        units=model.units,
        ignored=model.unsharded,
        device_type="cpu",
        world_size=communication.world_size,
    )
    model.keep_codes(not strategy_of(config.sharding).reshards_after_forward)


def _prepare(
    model: RotatedModel, checkpoint: StoredModel, config: Config, communication: Communication
) -> tuple[TrainingState, Teacher | None]:
    """Read the weights, and make what training needs, in the order of a run."""
    materialize(model.network, checkpoint, device=CPU, added=model.added)
    prepare(model)
    start_scales(model)
    state = TrainingState(model, config, communication=communication)
    taught = build(config.objective).distills and config.train.params.weights
    options: dict[str, Any] = {"device": CPU, "communication": communication, "ranks_per_node": None}
    return state, load_teacher(checkpoint, config, **options) if taught else None


def _step(
    state: TrainingState,
    division: Division,
    coordinator: Coordinator,
    config: Config,
    token_ids: Tensor,
    teacher: Teacher | None,
) -> dict[str, int]:
    """Make one step as the training loop does, and return what is held after each part of it."""
    held = {}
    with state.model.mode.set(rotate=True, quantize=True):
        loss = build(config.objective)(state.model, token_ids, teacher=teacher)
        loss.backward()
    number = loss.item()
    del loss
    held["backward"] = settled_bytes() + _gradients_to_come(state.model)
    division.collect()
    coordinator.consolidate(torch.zeros(1))
    coordinator.clip(config.train.max_grad_norm)
    held["ready"] = settled_bytes()
    state.advance(number)
    held["between"] = settled_bytes()
    return held


def _gradients_to_come(model: RotatedModel) -> int:
    """Return the bytes of the gradients of rotations that have none yet, since they act on divided weights alone."""
    late = [matrix for _, matrix in model.bank.items() if matrix.requires_grad and matrix.grad is None]
    return sum(matrix.numel() * matrix.element_size() for matrix in late)


def table(rows: Sequence[dict[str, Any]]) -> facts.Table:
    """Return the figures of the fullest rank for people, with the ratio of the rank that is furthest from its form."""
    columns = ["strategy", "weights in", "ranks", *KINDS, "backward done: form", "measured", "÷ form"]
    columns += ["step done: form", "measured", "÷ form", "peak resident"]
    return facts.make_table("MiB a rank, all parameters trained, with EMA", columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    fullest = max(row["by_rank"], key=lambda rank: rank["measured"]["backward"])
    kinds = [_mib(sum(fullest["kinds"][kind] for kind in together)) for together in KINDS.values()]
    cells = [row["request"]["strategy"], row["request"]["dtype"], str(len(row["by_rank"])), *kinds]
    for moment in ("backward", "between"):
        ratios = [rank["measured"][moment] / rank["predicted"][moment] for rank in row["by_rank"]]
        furthest = max(ratios, key=lambda ratio: abs(ratio - 1.0))
        cells += [_mib(fullest["predicted"][moment]), _mib(fullest["measured"][moment]), f"{furthest:.6f}"]
    return [*cells, _mib(max(rank["peak_rss_gib"] for rank in row["by_rank"]) * GIB)]


def _mib(size: float) -> str:
    return f"{size / MIB:.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every strategy in the smallest world in which it is not trivial, and write the figures."""
    parser = facts.parser(__doc__, output="trained_memory.json", repetitions=1)
    parser.add_argument("--model", default="135m", choices=RANDOM_SIZES)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each rank's one block")
    options = parser.parse_args(arguments)
    rows = []
    for strategy in options.strategies:
        for dtype in ("float32", "bfloat16") if STRATEGIES[strategy].splits_master else ("float32",):
            request = MemoryRequest(strategy, options.model, dtype, options.tokens)
            by_rank = measure_world(request, world_size=STRATEGIES[strategy].minimum_world)
            rows.append({"request": dataclasses.asdict(request), "by_rank": by_rank})
    facts.report(options.output, [table(rows)], {"trained_memory": rows})


if __name__ == "__main__":
    main()
