"""Build a finished run's model again: rotations placed and read, invariance proved, merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotexp.finished_run import FinishedRun
from rotexp.models.arch import find_spec
from rotexp.models.checkpoint import Checkpoint
from rotexp.models.load import build_model, open_checkpoint
from rotexp.models.materialize import materialize
from rotexp.models.save import plain_model
from rotexp.rotation.file import LoadedRotations, assign_rotations, load_rotations
from rotexp.rotation.hadamard import HadamardTransform
from rotexp.rotation.invariance import LIMITS, check_invariance, relative_error, trace
from rotexp.rotation.merge import bake_online, merge
from rotexp.rotation.norms import fold_norms
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.placement import place

PROOF_TOKENS = 64
"""Random tokens that the invariance proof runs on."""

WHERE = {
    "R3": "on every head's queries and keys, after the position embedding",
    "R4": "on the input of the down projections, before it is quantized",
}
"""Where each online transform acts, in words."""


@dataclass(frozen=True)
class Rebuilt:
    """A run's model before it is merged, in float32, its weights not read yet.

    Attributes:
        checkpoint: its source.
        model: rotations and quantizers in place, its bank holding the run's rotations.
        loaded: the run's rotations as its file has them.
        must_run: what the plain model does not do and a merged one needs, see `requirements`.
    """

    checkpoint: Checkpoint
    model: RotatedModel
    loaded: LoadedRotations
    must_run: dict[str, Any]


def rebuild(run: FinishedRun) -> Rebuilt:
    """Build the model a run ended with, without its weights.

    Raises:
        ValueError: the source cannot be opened any more, or the file of rotations is damaged or another model's.
    """
    config = run.config
    loaded = load_rotations(run.rotations, key="run")
    checkpoint = open_checkpoint(config.model, seed=config.seed)
    model = _place(checkpoint, run)
    assign_rotations(
        model.bank, loaded, model=checkpoint.identity, placements=model.placements, online=model.online, key="run"
    )
    return Rebuilt(checkpoint, model, loaded, requirements(model, checkpoint))


def _place(checkpoint: Checkpoint, run: FinishedRun) -> RotatedModel:
    network = build_model(checkpoint, dtype=torch.float32)
    spec = find_spec(checkpoint.config.model_type)
    return place(network, spec, run.config.rotation, run.config.quant, seed=run.config.seed)


def _prepare(model: RotatedModel) -> None:
    """Fold the norms' gains and bake the online transforms' counterparts, as a run does."""
    fold_norms(model.network, model.spec)
    bake_online(model)


def merge_rebuilt(rebuilt: Rebuilt) -> float:
    """Read the weights, merge the rotations into them, and prove that the float model is what it was.

    Returns:
        The merged model's relative logit error against the source, both in float32.

    Raises:
        ArithmeticError: it, or that of the rotated model before the merge, exceeds the limit.
    """
    model, limit = rebuilt.model, LIMITS[torch.float32]
    materialize(model.network, rebuilt.checkpoint, device=torch.device("cpu"))
    token_ids = _proof_tokens(model.network)
    original = trace(model, token_ids, rotate=False)
    _prepare(model)
    rotated = trace(model, token_ids, rotate=True)
    check_invariance(original, rotated, layers=model.spec.layers, dtype=torch.float32)
    merge(model)
    error = relative_error(original.logits, trace(model, token_ids, rotate=True).logits)
    if not error <= limit:
        raise ArithmeticError(f"invariance: merging changed the float logits by {error:.1e} relative (limit {limit})")
    return error


def _proof_tokens(network: nn.Module) -> Tensor:
    """Draw token_ids: (1, tokens)."""
    causal: Any = network
    vocabulary = causal.get_input_embeddings().weight.shape[0]
    return torch.randint(vocabulary, (1, PROOF_TOKENS), generator=torch.Generator().manual_seed(0))


def requirements(model: RotatedModel, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what an engine has to do beside the plain model: online transforms, and norms of another kind.

    Returns:
        `online`: name, kind, order, Kronecker factors, place of every transform; `norms`: the names of the plain model's
        norms that must run as `RMSNorm`. Both are empty where the plain model is all it takes.
    """
    online = [_transform(name, order) for name, order in model.online.items()]
    return {"online": online, "norms": {"run_as": "RMSNorm", "names": _replaced_norms(model.network, checkpoint)}}


def _transform(name: str, order: int) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "hadamard",
        "order": order,
        "factors": list(HadamardTransform(order).factors),
        "where": WHERE.get(name, name),
        "formula": "x @ H / sqrt(order), H = rotexp.rotation.hadamard.hadamard(order), on each block of that order",
    }


def _replaced_norms(network: nn.Module, checkpoint: Checkpoint) -> list[str]:
    """Return the norms that subtract a mean in the plain model and do not here."""
    ours = dict(network.named_modules())
    plain = plain_model(checkpoint.config, dtype=torch.float32)
    return [
        name
        for name, module in plain.named_modules()
        if isinstance(module, nn.LayerNorm) and type(ours.get(name)) is not type(module)
    ]
