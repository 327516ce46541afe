"""Under `numerics=exact` a run is the same bits in every world, under every sharding and wherever a micro-batch lies.

Of every run is compared what `ranks_exact.made` names, and the rotations of each of 20 steps on every rank, at default
rates. Ranks have one thread and two by turns.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from ranks_exact import Made, differing, run_digested
from world import run_world

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from families import FAMILIES, from_config

from rotexp.models import tiny

pytestmark = pytest.mark.slow

STEPS = 20
BASE = ["numerics=exact", f"train.steps={STEPS}", "data.global_batch_size=4"]
TWO = ["data.global_batch_size=8", "train.micro_batch_size=2"]
SIX = ["data.global_batch_size=6"]

QUANTS = ("w4a4", "w4a4kv4", "w16a4")
VARIANTS = {
    "plain": [],
    "accumulated": ["data.global_batch_size=8", "train.micro_batch_size=1"],
    "checkpointed": ["train.gradient_checkpointing=true"],
}
"""In the second every world of these accumulates gradients over micro-batches."""
ALONE = {"no_shard": ["sharding=no_shard"]}
PAIR = {
    "no_shard": ["sharding=no_shard"],
    "full": ["sharding=full", "sync_mode=universal"],
    "zero2": ["sharding=zero2"],
    "zero2_master": ["sharding=zero2_master"],
}
FOUR = {"full": ["sharding=full"], "hybrid": ["sharding=hybrid", "sync_mode=event"]}
WORLDS = {1: ALONE, 2: PAIR, 4: FOUR}
MATRIX = [
    (quant, variant, size, name) for quant in QUANTS for variant in VARIANTS for size in (2, 4) for name in WORLDS[size]
]

BOUND = 1e-3
"""The norm to which gradients are clipped where that is to matter; they are all longer."""
OTHERS = {
    "evaluated, averaged": [
        "evaluation.every=5",
        "ema.decay=0.9",
        "train.checkpoint_every=5",
        "train.keep_checkpoints=4",
    ],
    "kl, r4": ["objective=kl", "rotation=learned_r4"],
    "kl_topk": ["objective=kl_topk", "objective.k=2000"],
    "scales": ["train.params=rotations_and_scales"],
    "clipped": ["optimizer.step_rule=paper", "optimizer.lr=1.5", f"train.max_grad_norm={BOUND}"],
    "momentum": ["optimizer.momentum=0.5", f"train.max_grad_norm={BOUND}"],
    "two at once": TWO,
}
"""Of the other options of a run those by which more is computed, or in another order."""
SOME = {1: ALONE, 2: {"full": PAIR["full"]}, 4: {"hybrid": FOUR["hybrid"]}}
"""Where those are tried."""

UNEVEN = {
    "one at once": (SIX, (1, 2, 3)),
    "two at once": ([*SIX, "train.micro_batch_size=2"], (1, 3)),
    "three at once": ([*SIX, "train.micro_batch_size=3"], (1, 2)),
}
"""Six blocks a step, and the worlds that can take them so: 6, 3 and 2 micro-batches."""

ORIGIN = "evaluated, averaged"
"""The run whose checkpoint after five steps others begin at."""
RESUMED = {
    4: ("hybrid", FOUR["hybrid"], 1),
    2: ("zero2", PAIR["zero2"], 4),
    1: ("no_shard", ALONE["no_shard"], 4),
}
"""By the size of their world: how they are sharded, and the size of the world that left the checkpoint."""

SHAPES = ("random_llama", "opt")
"""Whose widths are no powers of two; one has biases. Experts depend on threads, of which ranks have unequal numbers."""

Runs = Callable[..., dict[str, list[Made]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """What every rank of a world made of some cases, which are run once."""
    root = tmp_path_factory.mktemp("exact")

    @cache
    def found(world_size: int, kind: str, variant: str = "") -> dict[str, list[Made]]:
        if kind == "resumed":
            found(RESUMED[world_size][2], "others", ORIGIN)
        folder = root / f"{kind} {variant} {world_size}"
        folder.mkdir()
        cases = cases_of(world_size, kind, variant, root)
        ranks = run_world(run_digested, cases, str(folder), world_size=world_size, folder=folder)
        return {name: [rank[name] for rank in ranks] for name in cases}

    return found


def cases_of(world_size: int, kind: str, variant: str, root: Path) -> dict[str, list[str]]:
    """Return the cases of a kind: a quantizer or `others`, of which one variant, a shape, or what a test calls so."""
    some = SOME.get(world_size, {})
    if kind in QUANTS:
        return under(WORLDS[world_size], [f"quant={kind}", *VARIANTS[variant]])
    if kind in SHAPES:
        return under(some, model_of(kind, root / f"{kind}{world_size}"))
    if kind == "others":
        return under(some, OTHERS[variant])
    if kind == "resumed":
        name, sharding, origin = RESUMED[world_size]
        folder = root / f"others {ORIGIN} {origin}" / next(iter(SOME[origin]))
        return under({name: sharding}, [*OTHERS[ORIGIN], f"resume='{folder}/checkpoints/step-00000005'"])
    if kind == "fast":
        return under(some, ["numerics=fast", "train.micro_batch_size=1"])
    sharding = f"sharding={'no_shard' if world_size == 1 else 'full'}"
    return {name: [*BASE, *given, sharding] for name, (given, sizes) in UNEVEN.items() if world_size in sizes}


def under(shardings: dict[str, list[str]], overrides: list[str]) -> dict[str, list[str]]:
    """Return the same case under every sharding."""
    return {name: [*BASE, *overrides, *sharding] for name, sharding in shardings.items()}


def model_of(shape: str, folder: Path) -> list[str]:
    """Return the overrides of a small model, which is written to the folder if rotexp has none like it."""
    if shape == "random_llama":
        return ["model=random_llama"]
    from_config(FAMILIES[shape].config(vocab_size=2048)).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.FOLDER / file, folder)
    return ["model=hf", f"model.path={folder}"]


def check_same(ranks: list[Made], expected: Made) -> None:
    """Check that every rank made the same as one that was alone."""
    assert [differing(made, expected) for made in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize(("quant", "variant", "world_size", "name"), MATRIX)
def test_a_world_makes_the_bits_of_one_rank(runs: Runs, quant: str, variant: str, world_size: int, name: str) -> None:
    (expected,) = runs(1, quant, variant)["no_shard"]
    check_same(runs(world_size, quant, variant)[name], expected)


@pytest.mark.parametrize("variant", OTHERS)
@pytest.mark.parametrize(("world_size", "name"), [(2, "full"), (4, "hybrid")])
def test_whatever_else_is_computed(runs: Runs, world_size: int, name: str, variant: str) -> None:
    (expected,) = runs(1, "others", variant)["no_shard"]
    check_same(runs(world_size, "others", variant)[name], expected)


@pytest.mark.parametrize("world_size", RESUMED)
def test_a_run_goes_on_in_another_world(runs: Runs, world_size: int) -> None:
    (expected,) = runs(1, "others", ORIGIN)["no_shard"]
    (ranks,) = runs(world_size, "resumed").values()
    for made in ranks:
        assert differing(made, {name: expected.get(name) for name in made}) == []
        assert {f"step {step}: R1" in made for step in range(6, STEPS + 1)} == {True}
        assert "step 5: R1" not in made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("world_size", "name"), [(2, "full"), (4, "hybrid")])
def test_other_shapes_and_families(runs: Runs, world_size: int, name: str, shape: str) -> None:
    (expected,) = runs(1, shape)["no_shard"]
    check_same(runs(world_size, shape)[name], expected)


@pytest.mark.parametrize(
    ("world_size", "name"), [(size, name) for name, (_, sizes) in UNEVEN.items() for size in sizes if size > 1]
)
def test_numbers_that_are_no_powers_of_two(runs: Runs, world_size: int, name: str) -> None:
    (expected,) = runs(1, "uneven")[name]
    check_same(runs(world_size, "uneven")[name], expected)


def test_what_is_compared_is_all_that_a_run_makes(runs: Runs) -> None:
    (plain,) = runs(1, "w4a4", "plain")["no_shard"]
    per_step = ("R1", "R2_0", "train/loss", "train/lr", "grad_norm/total", "grad_norm/rotations")
    for step in range(1, STEPS + 1):
        assert {f"step {step}: {name}" for name in per_step} <= plain.keys()
    saved = {name.partition(": ")[2] for name in plain if name.startswith(f"checkpoint step-{STEPS:08d}")}
    assert {"rotations/R1", "best/R1", "start/R1"} <= saved
    assert {"rotations.safetensors: R1", "rotations_best.safetensors: R1"} <= plain.keys()
    rows = ("float", "quantized", "hadamard", "trained", "protocol")
    assert {f"evaluation: {row}" for row in rows} <= plain.keys()
    assert len({plain[f"step {step}: R1"] for step in range(1, STEPS + 1)}) == STEPS, "every step moves"


def test_the_other_options_act(runs: Runs) -> None:
    others = {name: runs(1, "others", name)["no_shard"][0] for name in OTHERS}
    for name in ("clipped", "momentum"):
        assert min(others[name][f"step {step}: grad_norm/total"] for step in range(1, STEPS + 1)) > BOUND
    assert {f"step {step}: eval/loss" for step in range(0, STEPS + 1, 5)} <= others["evaluated, averaged"].keys()
    assert "evaluation: average" in others["evaluated, averaged"]
    halfway = [
        name for name in others["evaluated, averaged"] if name.startswith("checkpoint step-00000005: clip_ratios/")
    ]
    assert halfway, "the ratios in use, which the last step has just forgotten"
    assert "step 1: grad_norm/weights" in others["scales"]
    assert len({made[f"step {STEPS}: R1"] for made in others.values()}) == len(OTHERS)


def test_the_size_of_a_micro_batch_is_part_of_the_request(runs: Runs) -> None:
    """As the documentation says: so it is promised for one size, and not between two."""
    of_sizes = [runs(1, "uneven")[name][0] for name in UNEVEN]
    assert len({made[f"step {STEPS}: R1"] for made in of_sizes}) > 1


def test_fast_parts_where_exact_does_not(runs: Runs) -> None:
    """So these tests can fail: the same micro-batches, added as they come."""
    (expected,) = runs(1, "fast")["no_shard"]
    for world_size, name in ((2, "full"), (4, "hybrid")):
        parted = runs(world_size, "fast")[name][0]
        assert differing(parted, expected)
        assert parted[f"step {STEPS}: R1"] != expected[f"step {STEPS}: R1"]
        assert parted["evaluation: trained"] != expected["evaluation: trained"]
