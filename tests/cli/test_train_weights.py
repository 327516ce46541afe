"""More than rotations is trained: what is named and nothing else, against the float model as it was, and exported."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_train import Run, run_train, saved_tensors
from safetensors import safe_open
from safetensors.torch import load_file

from rotexp.data.blocks import cut
from rotexp.models import tiny
from rotexp.training.options import AdamWConfig

pytestmark = pytest.mark.slow

Train = Callable[..., Run]

FIXED = ["data.global_batch_size=4", "train.steps=4", "train.lr_schedule=constant", "tracker=jsonl"]
"""With a calibration text of four blocks, every step has the same batch."""

LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
)
QUANTIZED = [f"model.layers.{layer}.{name}.weight" for layer in range(2) for name in (*LINEARS, "mlp.down_proj")]
NORMS = [
    *(f"model.layers.{layer}.{name}_layernorm.weight" for layer in range(2) for name in ("input", "post_attention")),
    "model.norm.weight",
]
TRAINED = {
    "rotations_and_norms": set(NORMS),
    "rotations_and_scales": {f"quantizer_scales.{name.replace('.', '-')}" for name in QUANTIZED},
    "all": {"model.embed_tokens.weight", "lm_head.weight", *NORMS, *QUANTIZED},
}

LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


@pytest.fixture(scope="module")
def four_blocks(texts: list[str], checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A calibration text of four blocks of 32 tokens, as an override."""
    from transformers import AutoTokenizer

    whole = Path(texts[1].partition("=")[2]).read_text()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    short = tokenizer.decode(tokenizer(whole, add_special_tokens=False)["input_ids"][:140])
    assert len(cut(short, tokenizer, length=32, rows=2048, key="text")) == 4
    file = tmp_path_factory.mktemp("text") / "short.txt"
    file.write_text(short)
    return f"data.calibration={file}"


@pytest.fixture(scope="module")
def train(small: list[str], four_blocks: str, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train the small model on one batch."""

    def run(*arguments: str) -> Run:
        given = {argument.partition("=")[0]: argument for argument in (*small, four_blocks, *FIXED, *arguments)}
        ended = run_train(tmp_path_factory.mktemp("run") / "folder", *given.values())
        assert (ended.code, ended.errors, ended.left_behind) == (0, "", [])
        return ended

    return run


@pytest.fixture(scope="module")
def trained(train: Train) -> dict[str, Run]:
    """A run of each kind; their rotations hardly move."""
    still = ["optimizer.lr=1e-6", "adamw.lr=1e-2"]
    coarse = [
        "objective=kl",
        "quant.weights.bits=3",
        "quant.weights.clip_search=false",
        "adamw.lr=1e-5",
    ]  # where scales can be far better, at a rate of their own
    further = {"rotations_and_norms": [], "rotations_and_scales": coarse, "all": ["ema.decay=0.5"]}
    return {params: train(f"train.params={params}", *still, *given) for params, given in further.items()}


@pytest.mark.parametrize("params", TRAINED)
def test_what_is_named_is_trained_and_written_and_nothing_else(trained: dict[str, Run], params: str) -> None:
    run = trained[params]
    weights = load_file(run.folder / "weights.safetensors")
    assert set(weights) == TRAINED[params]
    with safe_open(run.folder / "weights.safetensors", framework="pt") as file:
        assert file.metadata()["config_digest"] == run.summary["config_digest"]
    assert run.steps[-1]["train/loss"] < run.steps[0]["train/loss"]
    assert all(row["grad_norm/weights"] > 0 for row in run.steps)
    assert [row["train/lr_weights"] for row in run.steps] == [1e-2] * 4


def test_the_float_row_and_the_teacher_stay_the_models_own(trained: dict[str, Run]) -> None:
    """Weights that moved far are far from the float model that there was, which no quantization error explains."""
    norms, scales, weights = (run.summary["evaluation"] for run in trained.values())
    assert norms["float"] == scales["float"] == weights["float"]
    # Where the head is trained, the float model's states are kept instead of its distributions.
    assert weights["hadamard"] == pytest.approx(norms["hadamard"], rel=3e-6, abs=1e-7)
    assert weights["trained"]["kl"] > 10 * weights["hadamard"]["kl"]
    assert scales["trained"]["kl"] < scales["hadamard"]["kl"]


def test_learning_scales_alone_helps_held_out_text_at_its_default_rate(tmp_path: Path) -> None:
    """Of `tiny`, whose Hadamard rotations stay; the random models of the other tests learn nothing held out."""
    few = ["train.steps=30", "train.log_every=30", "evaluation.max_windows=24", "tracker=jsonl"]
    run = run_train(tmp_path / "run", "rotation=hadamard", "train.params=rotations_and_scales", *few)
    assert (run.code, run.errors) == (0, "")
    assert run.steps[-1]["train/lr_weights"] < AdamWConfig.scales_lr == 1e-2
    assert run.perplexities["trained"] < 0.98 * run.perplexities["hadamard"]


def test_an_average_has_a_row_and_orthogonal_rotations(trained: dict[str, Run]) -> None:
    run = trained["all"]
    assert run.perplexities["average"] not in (run.perplexities["trained"], run.perplexities["hadamard"])
    averaged = load_file(run.folder / "rotations_average.safetensors")
    assert averaged.keys() == run.rotations.keys()
    for name, matrix in averaged.items():
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)), rtol=0, atol=1e-5)
        assert not torch.equal(matrix, run.rotations[name])
    assert "average" not in trained["rotations_and_norms"].perplexities
    assert not (trained["rotations_and_norms"].folder / "rotations_average.safetensors").exists()


def test_a_run_that_made_it_worse_says_so_and_keeps_its_start(train: Train) -> None:
    """Steps of three radians, and of the whole of a norm's gain, spoil a model that has been trained, and at once."""
    far = ("optimizer.lr=3.0", "optimizer.retract_every=1", "train.params=rotations_and_norms", "adamw.lr=1.0")
    run = train(f"model.path={tiny.FOLDER}", *far)
    first, *later = (row["train/loss"] for row in run.steps)
    assert first + 1.0 < min(later)
    assert run.perplexities["trained"] > 2 * run.perplexities["hadamard"]
    assert (run.summary["train"]["best_step"], run.summary["train"]["improved"]) == (1, False)
    kept, norms = (load_file(run.folder / f"{file}_best.safetensors") for file in ("rotations", "weights"))
    start = {name.partition("/")[2]: t for name, t in saved_tensors(run.folder, 4).items() if name.startswith("start/")}
    assert kept.keys() == start.keys() == run.rotations.keys()
    for name, matrix in run.rotations.items():
        assert torch.equal(kept[name], start[name])
        assert not torch.equal(kept[name], matrix)
        torch.testing.assert_close(matrix @ matrix.mT, torch.eye(len(matrix)), rtol=0, atol=1e-6)
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in norms.values())  # R1 has them in the weights


@pytest.mark.parametrize("sharding", ["no_shard", "full", "zero2_master"])
def test_the_best_by_held_out_loss_is_kept_whole(train: Train, sharding: str) -> None:
    """Learning rates this large make the model worse from some step on; four blocks are soon learned by heart."""
    given = ("train.params=all", f"sharding={sharding}", "adamw.lr=1e-2", "train.steps=6", "evaluation.every=1")
    run = train(*given, "train.checkpoint_every=1", "train.keep_checkpoints=6")
    held_out = {row["step"]: row["eval/loss"] for row in run.rows if "eval/loss" in row}
    assert list(held_out) == list(range(7))
    assert math.exp(held_out[0]) == pytest.approx(run.perplexities["hadamard"], rel=1e-5)
    assert math.exp(held_out[6]) == pytest.approx(run.perplexities["trained"], rel=1e-5)
    best = run.summary["train"]["best_step"]
    assert (best, run.summary["train"]["best_by"]) == (min(held_out, key=held_out.__getitem__), "eval/loss")
    assert 0 < best < 6
    saved = saved_tensors(run.folder, best)
    for kind, file in (("rotations", "rotations_best"), ("weights", "weights_best")):
        kept = load_file(run.folder / f"{file}.safetensors")
        expected = {name.partition("/")[2]: tensor for name, tensor in saved.items() if name.startswith(f"{kind}/")}
        assert kept.keys() == expected.keys()
        for name, tensor in kept.items():
            torch.testing.assert_close(tensor.flatten(), expected[name].flatten(), rtol=0, atol=0)
    last = load_file(run.folder / "weights.safetensors")
    assert {name: tensor.shape for name, tensor in last.items()} == {n: t.shape for n, t in kept.items()}
    assert not torch.equal(kept["lm_head.weight"], last["lm_head.weight"])


@pytest.mark.parametrize("sharding", ["no_shard", "full", "zero2"])
def test_measuring_while_training_says_what_the_rows_do_and_changes_no_bit(train: Train, sharding: str) -> None:
    """Rotations move at the default rate while clip ratios stay those of the first step, of own rows if sharded."""
    given = (f"sharding={sharding}", "train.checkpoint_every=3", "train.steps=6")
    measured, plain = train(*given, "evaluation.every=2"), train(*given)
    held_out = {row["step"]: row["eval/loss"] for row in measured.rows if "eval/loss" in row}
    assert list(held_out) == [0, 2, 4, 6]
    assert math.exp(held_out[0]) == pytest.approx(measured.perplexities["hadamard"], rel=1e-5)
    assert math.exp(held_out[6]) == pytest.approx(measured.perplexities["trained"], rel=1e-5)
    for key in ("train/loss", "grad_norm/total"):
        assert [row[key] for row in measured.steps] == [row[key] for row in plain.steps]
    for step in (3, 6):
        found, expected = (saved_tensors(run.folder, step) for run in (measured, plain))
        kept = {name for name in expected if not name.startswith("best/")}
        assert kept == {name for name in found if not name.startswith("best/")}
        assert any(name.startswith("clip_ratios/") for name in kept)
        for name in kept:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0, msg=name)


def test_an_export_computes_what_was_trained(train: Train, four_blocks: str, tmp_path: Path) -> None:
    """Without quantizers the run's own held-out perplexity of the trained model is that of the plain model exported."""
    run = train("train.params=all", "adamw.lr=1e-2", "rotation=hadamard", "quant=none")
    assert run.perplexities["trained"] != pytest.approx(run.perplexities["float"], rel=1e-2)
    command = [sys.executable, "-m", "rotexp.export", f"run={run.folder}", f"export.path={tmp_path / 'model'}"]
    exported = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert (exported.returncode, exported.stderr) == (0, "")
    blocks = windows(run, tmp_path / "model")
    torch.save(blocks, tmp_path / "ids.pt")
    command = [
        sys.executable,
        "-c",
        LOGITS,
        str(tmp_path / "model"),
        str(tmp_path / "ids.pt"),
        str(tmp_path / "out.pt"),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    logits = torch.load(tmp_path / "out.pt")
    losses = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
    assert math.exp(losses.item()) == pytest.approx(run.perplexities["trained"], rel=1e-4)


def windows(run: Run, model: Path) -> torch.Tensor:
    """Return the held-out windows of a run."""
    from transformers import AutoTokenizer

    resolved = (run.folder / "config.resolved.yaml").read_text().splitlines()
    (file,) = [line.split(": ")[1].strip("'\"") for line in resolved if line.startswith("  evaluation: ")]
    text = Path(file).read_text(encoding="utf-8")
    return torch.from_numpy(cut(text, AutoTokenizer.from_pretrained(model), length=32, rows=2048, key="text")[:4])


def test_a_simulated_world_is_marked_everywhere_and_leaves_nothing_to_go_on_from(train: Train) -> None:
    run = train("train.params=all", "sharding=zero2_master", "sharding.sim_world=4", "train.checkpoint_every=1")
    assert run.summary["simulated_world"] == 4
    assert run.summary["world_size"] == 1
    assert all(row["sharding/sim_world"] == 4.0 for row in run.rows)
    with safe_open(run.folder / "rotations.safetensors", framework="pt") as file:
        assert file.metadata()["simulated_world"] == "4"
    assert "simulated world of 4: not a real training" in run.output
    assert not (run.folder / "weights.safetensors").exists()
    assert not (run.folder / "checkpoints").exists()
    command = [sys.executable, "-m", "rotexp.export", f"run={run.folder}", f"export.path={run.folder / 'model'}"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=200)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


def test_bf16_weights_move_by_updates_below_their_resolution(train: Train, checkpoint: Path) -> None:
    """On two ranks, each of them holding half of the master, at the default rate.

    A step is less than half of most weights' last bit, so in bf16 they would never move; in the master steps add up.
    """
    given = ("train.params=all", "sharding=zero2_master", "model.dtype=bfloat16")
    run = train(*given, "train.steps=6", "optimizer.lr=1e-6")
    weights = load_file(run.folder / "weights.safetensors")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    name, largest = "model.layers.1.mlp.down_proj.weight", 1.2 * AdamWConfig().lr
    start = load_file(checkpoint / "model.safetensors")[name].bfloat16().float()
    stuck = ((start + largest).bfloat16() == start) & ((start - largest).bfloat16() == start)
    moved = (weights[name] - start).abs()
    assert stuck.float().mean() > 0.7
    assert moved.max() <= 6 * largest
    assert (moved[stuck] > largest).float().mean() > 0.7
    assert run.summary["world_size"] == 2
    losses = [row["train/loss"] for row in run.steps]
    assert losses[-1] < losses[0]
