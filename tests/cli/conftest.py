"""A checkpoint and texts so small that a run takes seconds."""

import pydoc_data.topics
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from rotexp.models import tiny

SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""A Llama that takes the shipped tokenizer; no size but the vocabulary's is a power of two."""


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two short texts of English prose, as overrides; topic 21 repeats passages of the topics before it."""
    folder = tmp_path_factory.mktemp("texts")
    topics = list(pydoc_data.topics.topics.values())
    overrides = []
    for name, text in (
        ("calibration", "\n".join(topics[:20])),
        ("evaluation", "\n".join([topics[20], *topics[22:30]])),
    ):
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
        overrides.append(f"data.{name}={folder / name}.txt")
    return ["data=text", *overrides]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with tied embeddings, in the Hugging Face format; norm gains are random."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "small")


@pytest.fixture(scope="session")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a down projection 50 wide, for which there is no Hadamard matrix."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "odd", intermediate_size=50)


@pytest.fixture(scope="session")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with as many layers as Gemma 3 270M, and heads as wide: one R1, and 18 rotations R2 of order 256."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "wide", num_hidden_layers=18, **heads)


def make_checkpoint(folder: Path, **changes: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE | changes, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.FOLDER / file, folder)
    return folder


@pytest.fixture(scope="session")
def small(checkpoint: Path, texts: list[str]) -> list[str]:
    """The overrides of a run of two steps in seconds."""
    return [
        "model=hf",
        f"model.path={checkpoint}",
        *texts,
        "data.sequence_length=32",
        "data.global_batch_size=4",
        "evaluation.window=32",
        "evaluation.max_windows=4",
        "train.steps=2",
        "launch.threads=1",
    ]
