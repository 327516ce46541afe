"""With as many threads a run repeats, and three and three steps are six, bit for bit; by default with all cores.

The shipped model's R1 has order 192: from about 160 on the number of threads decides the last bits of a step.
"""

from __future__ import annotations

import json

import pytest
import torch
from run_train import Run, run_train, saved_tensors
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

TINY = (
    "data.sequence_length=64",
    "data.global_batch_size=4",
    "evaluation.window=64",
    "evaluation.max_windows=2",
    "train.steps=6",
    "train.checkpoint_every=3",
    "tracker=jsonl",
)
CASES = {
    "default": (),
    "two threads on each of two ranks": ("launch.threads=2", "sharding=full"),
    "everything trained by two threads": ("launch.threads=2", "train.params=all", "ema.decay=0.9"),
}


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Six steps, the same again by the first run's resolved configuration, and the last three from its checkpoint."""
    root, given = tmp_path_factory.mktemp("threads"), (*TINY, *CASES[request.param])
    first = run_train(root / "first", *given, timeout=900)
    resolved = ("--config-dir", str(first.folder), "--config-name", "config.resolved")
    halfway = f"resume={first.folder / 'checkpoints' / 'step-00000003'}"
    ended = {
        "first": first,
        "again": run_train(root / "again", *resolved, timeout=900),
        "resumed": run_train(root / "resumed", *given, halfway, timeout=900),
    }
    assert [(run.code, run.errors) for run in ended.values()] == [(0, "")] * 3
    return ended


@pytest.mark.parametrize("other", ["again", "resumed"])
def test_a_run_repeats_and_goes_on_bit_for_bit(runs: dict[str, Run], other: str) -> None:
    first, second = runs["first"], runs[other]
    assert first.rotations["R1"].shape == (192, 192)
    assert [row["step"] for row in second.steps] == ([4, 5, 6] if other == "resumed" else list(range(1, 7)))
    for key in ("train/loss", "grad_norm/total"):
        assert [row[key] for row in second.steps] == [row[key] for row in first.steps[-len(second.steps) :]]
    for file in (path.name for path in first.folder.glob("*.safetensors")):
        found, expected = (load_file(run.folder / file) for run in (second, first))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), file
    found, expected = (saved_tensors(run.folder, 6) for run in (second, first))
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert json.dumps(second.summary["evaluation"]) == json.dumps(first.summary["evaluation"])
