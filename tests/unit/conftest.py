"""Small random Llama models, as Hugging Face makes them and rotexp prepares them; threads; the table of flags."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flags import ROW
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rotexp.models.arch import find_spec
from rotexp.models.load import build_model
from rotexp.models.materialize import materialize
from rotexp.models.stored_model import StoredModel
from rotexp.quant.options import QuantConfig
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class TensorWeights:
    """Weights that lie in memory."""

    tensors: dict[str, Tensor]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        return self.tensors[name][rows]


@pytest.fixture(scope="session")
def llama() -> Callable[..., LlamaForCausalLM]:
    """Make a small Llama; biases, norm gains and weights are random, for fresh ones would hide folding bugs."""

    @torch.no_grad()
    def make(*, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> LlamaForCausalLM:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE | config), dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                fan_in = parameter.shape[1] if parameter.ndim == 2 and "embed" not in name else 1
                parameter.normal_(std=fan_in**-0.5, generator=generator)
        return model.eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def rotated() -> Callable[..., RotatedModel]:
    """Build a source model anew with rotations and quantizers placed; `ready` also folds norms and bakes Hadamards."""

    def make(
        source: LlamaForCausalLM,
        rotation: RotationConfig | None = None,
        quant: QuantConfig | None = None,
        *,
        seed: int = 0,
        ready: bool = True,
    ) -> RotatedModel:
        tied = source.lm_head.weight is source.model.embed_tokens.weight
        aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
        weights = TensorWeights({name: parameter.detach() for name, parameter in source.named_parameters()})
        checkpoint = StoredModel("test", source.config, weights, "", aliases=aliases)
        network = build_model(checkpoint, dtype=source.dtype)
        model = place(network, find_spec(network), rotation or RotationConfig(), quant or QuantConfig(), seed=seed)
        materialize(network, checkpoint, device=torch.device("cpu"), added=model.added)
        if ready:
            prepare(model)
        return model

    return make


@pytest.fixture(scope="session")
def token_ids() -> Tensor:
    """Token ids (3, 10)."""
    return torch.randint(SHAPE["vocab_size"], (3, 10), generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Give torch so many threads during a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of models and flags: the error of the rotated logits, or what stands in a rotation's way."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    rows = [report.user_properties for report in reports if report.user_properties[:1]]
    rows = sorted((row for row in rows if row[0][0] == ROW), key=lambda row: row[0][1])
    if rows:
        terminalreporter.section("rotated and original logits, by model and flag")
    for (_, name), *columns in rows:
        figures = [f"{key} {value:.0e}" if isinstance(value, float) else f"{key} {value}" for key, value in columns]
        terminalreporter.write_line(f"{name}: {'; '.join(dict.fromkeys(figures))}")
