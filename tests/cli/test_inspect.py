"""`python -m rotexp.inspect` says what would be rotated where, from a config alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Gemma2Config, LlamaConfig, MixtralConfig, OlmoConfig, OPTConfig, Phi3Config, PreTrainedConfig

REPOSITORY = Path(__file__).parents[2]
SHAPE = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}
GROUPED = SHAPE | {"num_key_value_heads": 2}


def inspect(*overrides: str, place: Path) -> tuple[int, str, str]:
    """Return exit code, output with runs of spaces as one, and errors."""
    run = subprocess.run(
        [sys.executable, "-m", "rotexp.inspect", *overrides],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=place,
        env={"TRANSFORMERS_VERBOSITY": "error"} | os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"},
        check=False,
    )
    return run.returncode, " ".join(run.stdout.replace("│", " ").split()), run.stderr


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A folder for a model's config; there are no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def inspected(config: PreTrainedConfig, *overrides: str, folder: Path) -> str:
    config.save_pretrained(folder)
    code, output, errors = inspect("model=hf", f"model.path={folder}", *overrides, place=folder)
    assert code == 0, errors
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]  # no run folder, nothing else
    return output


def test_a_flag_that_a_rotation_cannot_pass_is_named(described: Path) -> None:
    config = OlmoConfig(**GROUPED, clip_qkv=8.0, eos_token_id=2)
    named = "model_type=olmo: clip_qkv=8.0 stands between values and output"
    output = inspected(config, folder=described)
    assert "R1 placed merged into weights" in output
    assert f"R2 left out: {named}" in output
    assert f"R2 refused: rotation.r2=true: cannot act: {named}" in inspected(
        config, "rotation.r2=true", folder=described
    )


def test_a_llama_is_shown_module_by_module(described: Path) -> None:
    output = inspected(LlamaConfig(**GROUPED), "rotation=learned_r3_r4", folder=described)
    assert "R1 placed merged into weights 48 = 48" in output
    assert "parameters 65,136" in output  # transformers counts as many
    assert "R3 placed online 12 = 12" in output
    assert "R4 placed online 80 = " in output
    assert "layers 0-2 (3)" in output
    assert "self_attn.v_proj 24 x 48 reads R1 R2 4 4" in output
    assert "mlp.down_proj 48 x 80 writes R4: H80, online R1 4 4" in output
    assert "lm_head 99 x 48 reads: head R1 16 16" in output


def test_what_cannot_exist_is_left_out_or_refused(described: Path) -> None:
    config = Gemma2Config(**GROUPED | {"intermediate_size": 50}, head_dim=12)
    output = inspected(config, "rotation.r4=true", folder=described)
    assert "R1 left out: model_type=gemma2: post_attention_layernorm and post_feedforward_layernorm have" in output
    assert "R4 refused: rotation.r4=true: cannot act: no Hadamard matrix of order 50 exists" in output
    assert "R3 off" in output
    assert "self_attn.v_proj 24 x 48 reads R2 4 4" in output
    assert "R1 refused: rotation.r1=true" in inspected(config, "rotation.r1=true", folder=described)
    blocks = inspected(LlamaConfig(**GROUPED), "rotation.block_size=7", folder=described)
    assert "R1 refused: rotation.block_size=7: must divide 48" in blocks


def test_the_block_advised_for_an_order_without_construction_is_accepted(described: Path) -> None:
    config = LlamaConfig(**GROUPED | {"intermediate_size": 2 * 668})
    refused = inspected(config, "rotation.r4=true", folder=described)
    assert "R4 refused: rotation.r4=true: cannot act: no construction known here for order 1336" in refused
    advice = re.search(r"or (rotation\.block_size=\d+) \(the largest that R1 and R4 can both have\)", refused)
    assert advice is not None
    followed = inspected(config, "rotation.r4=true", advice[1], folder=described)
    assert "R1 placed merged into weights 8 = 8" in followed
    assert "R4 placed online 8 = 8" in followed


def test_fused_linears_layer_norms_and_experts(described: Path) -> None:
    assert "qkv_proj 96 x 48 reads R1 R2 (values)" in inspected(Phi3Config(**GROUPED, pad_token_id=0), folder=described)
    experts = inspected(MixtralConfig(**GROUPED, num_local_experts=3), folder=described)
    assert "mlp.gate 3 x 48 reads: router, not quantized R1" in experts
    assert "mlp.experts 3 x 160 x 48 reads and writes: experts R1 R1 4 4" in experts
    opt = inspected(OPTConfig(**SHAPE, ffn_dim=80, word_embed_proj_dim=48), folder=described)
    assert "LayerNorm, run as RMSNorm under R1" in opt
    assert "model.decoder.embed_positions 2050 x 48 writes: positions R1" in opt


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=hf", "model.path=nowhere"], "model.path=nowhere"),
        (["rotaton=learned"], "nearest: rotation"),
        (["model=hf", "model.path=gpt2"], "model_type=gpt2: this architecture is not supported"),
        (["model=hf", "model.path=bert"], "model_type=bert: this architecture is not supported"),
        (
            ["model=hf", "model.path=reformer"],
            "reformer/config.json: model_type=reformer: transformers cannot build",
        ),
        (
            ["model=hf", "model.path=gemma4_unified_text"],
            "its layers differ in head_dim, which is not supported; choose",
        ),
    ],
)
def test_wrong_requests_are_refused_in_one_line(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_embd": 48, "n_layer": 1, "n_head": 4}')
    for kind in ("bert", "reformer", "gemma4_unified_text"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "warning")  # as it is for people
    code, output, errors = inspect(*overrides, place=tmp_path)
    assert (code, output, errors.count("\n")) == (2, "", 1), errors
    assert message in errors
