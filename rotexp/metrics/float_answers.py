"""What the float model answers on held-out windows, made once and compared with every variant of the model.

Where logits are linear in what the head reads, h, no vocabulary of the float model's is needed again. With the float
model's p and its head's rows w_v the divergence of a variant with the same head is, for each token,

    KL(p ‖ q) = Σ p_v (z_v − log Z) − (h' · m − log Z'),   m = Σ p_v w_v,

so that m (as wide as h), the first term and the most likely token are kept. In float32 a perplexity differs from that
of whole logits by at most 3e-6 of itself, a mean divergence by 3e-6 of itself or 1e-7 of the largest logit.

Elsewhere the final states are kept, and the head reads them again beside a variant's: behind a soft cap, in dtypes
whose logits are rounded coarsely, and where weights are trained, so that a variant has another head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rotexp.data.blocks import TokenBlocks
from rotexp.metrics.quality import (
    Likelihoods,
    Quality,
    Share,
    compare,
    likelihoods,
    targets_of,
    window_sums,
)
from rotexp.models.arch import embedding_name
from rotexp.rotation.model import RotatedModel
from rotexp.rotation.norms import last_gain
from rotexp.rotation.products import rotate_columns
from rotexp.rotation.readout import FinalStates, Readout, final_states, read, reread

BESIDE_BYTES = 24
"""Of what is kept of a token beside a vector of the stream's width."""


@dataclass(frozen=True)
class Expected:
    """What is kept of one batch's distributions, for all its tokens in order.

    Attributes:
        rows: m, (tokens, hidden), of the head as it was then.
        bias: Σ p_v b_v, (tokens,), float64.
        certainty: Σ p_v log p_v, (tokens,), float64.
        likeliest: (tokens,).
    """

    rows: Tensor
    bias: Tensor
    certainty: Tensor
    likeliest: Tensor


@dataclass(frozen=True)
class Origin:
    """In which state the model was when its answers were kept.

    Attributes:
        folded, merged: whether the last norm's gain was in the head, and R1.
        gain, shift: of the last norm, (hidden,), if they are still to be folded.
    """

    folded: bool
    merged: bool
    gain: Tensor | None = None
    shift: Tensor | None = None


class FloatAnswers:
    """The float model's answers on the windows of this rank.

    Attributes:
        kept: whether they are kept; if not they are made anew for every variant.
    """

    def __init__(self, windows: TokenBlocks, share: Share, *, expects: bool, kept: bool = True) -> None:
        """Take what is measured.

        Args:
            expects: whether every variant will have the float model's head.
            kept: whether there is memory to keep them, see `kept_bytes`.
        """
        self.kept = kept
        self._windows = windows
        self._share = share
        self._expects = expects and kept
        self._origin: Origin | None = None
        self._expected: dict[tuple[int, ...], Expected] = {}
        self._states: dict[tuple[int, ...], FinalStates] = {}

    @property
    def wanting(self) -> bool:
        """Whether answers that are to be kept have not been made yet."""
        return self.kept and self._origin is None

    @property
    def complete(self) -> bool:
        """Whether variants are compared without anything of the float model, its head included."""
        return bool(self._expected)

    def make(self, model: RotatedModel, *, teacher: RotatedModel | None = None) -> Quality:
        """Let the float model answer, and return its own figures.

        Args:
            teacher: the float model, where weights of `model` have been trained.
        """
        source = model if teacher is None else teacher
        self._origin = _origin(source, to_be_rotated=_is_rotated(model))

        def scores_of(indices: tuple[int, ...], token_ids: Tensor) -> Tensor:
            nll = _inside_head(source, token_ids, lambda readout: self._answer(readout, indices, token_ids))
            return window_sums(nll.reshape(*token_ids.shape, 1))

        with source.mode.set(rotate=False, quantize=False):
            return Quality.of_means(*self._share.means(scores_of, self._windows, figures=1))

    def compared(self, model: RotatedModel, *, teacher: RotatedModel | None = None) -> Quality:
        """Return the figures of a model in its present mode.

        Args:
            teacher: as for `make`.
        """

        def scores_of(indices: tuple[int, ...], token_ids: Tensor) -> Tensor:
            if indices in self._expected:
                expected = self._brought(self._expected[indices], model)
                figures = _inside_head(model, token_ids, lambda readout: _against(readout, expected, token_ids))
            else:
                states = self._states_of(indices, token_ids, teacher or model)
                figures = _inside_head(
                    model, token_ids, lambda readout: _beside(readout, states, token_ids, teacher=teacher)
                )
            return window_sums(figures.reshape(*token_ids.shape, -1))

        return Quality.of_means(*self._share.means(scores_of, self._windows, figures=3))

    def _answer(self, readout: Readout, indices: tuple[int, ...], token_ids: Tensor) -> Tensor:
        """Keep what later variants are compared with; return the negative log-likelihoods (tokens,)."""
        targets = targets_of(token_ids)
        factor = readout.factor() if self._expects and readout.weight.dtype in (torch.float32, torch.float64) else None
        if factor is not None:
            nll, expected = _expect(readout, targets, factor)
            self._expected[indices] = expected
            return nll
        if self.kept:
            self._states[indices] = replace(readout.states, values=readout.states.values.cpu())
        return _nll(readout, targets)

    def _states_of(self, indices: tuple[int, ...], token_ids: Tensor, source: RotatedModel) -> FinalStates:
        """Return the float model's final states, kept or made anew."""
        states = self._states.get(indices)
        if states is None:
            with source.mode.set(rotate=False, quantize=False):
                return final_states(source, token_ids)
        return replace(states, values=states.values.to(token_ids.device))

    def _brought(self, expected: Expected, model: RotatedModel) -> Expected:
        """Bring expected rows to the head as it is now."""
        assert self._origin is not None
        rows, bias = expected.rows.to(self._share.device), expected.bias.to(self._share.device)
        now = _origin(model, to_be_rotated=False)
        if now.folded and not self._origin.folded:
            if self._origin.shift is not None:
                bias = bias + rows.double() @ self._origin.shift.double()
            rows = rows if self._origin.gain is None else rows * self._origin.gain
        if now.merged and not self._origin.merged and model.merged_residual is not None:
            rows = rotate_columns(rows, model.merged_residual)
        return Expected(rows, bias, *(each.to(self._share.device) for each in (expected.certainty, expected.likeliest)))


def next_token_loss(model: RotatedModel, windows: TokenBlocks, *, share: Share) -> float:
    """Return the mean negative log-likelihood in nats, the logarithm of the perplexity, of a model in its mode."""

    def scores_of(_indices: tuple[int, ...], token_ids: Tensor) -> Tensor:
        nll = _inside_head(model, token_ids, lambda readout: _nll(readout, targets_of(token_ids)))
        return window_sums(nll.reshape(*token_ids.shape, 1))

    return share.means(scores_of, windows, figures=1)[0]


def kept_bytes(windows: TokenBlocks, share: Share, model: RotatedModel) -> int:
    """Return about how much memory of the host this rank's answers take if they are kept."""
    tokens = sum(map(len, share.indices(windows))) * int(windows.shape[1])
    width = model.network.get_parameter(f"{embedding_name(model.network)}.weight").shape[1]
    return tokens * (width * torch.float32.itemsize + BESIDE_BYTES)


def _is_rotated(model: RotatedModel) -> bool:
    """Return whether the stream is rotated, now or once the model is prepared, for which the last norm is folded."""
    return model.residual is not None or model.merged_residual is not None


def _origin(model: RotatedModel, *, to_be_rotated: bool) -> Origin:
    """Return the state of a model, with what of its last norm is folded if it is to be rotated and is not yet."""
    folded = model.prepared and _is_rotated(model)
    coming = last_gain(model.network, model.spec) if to_be_rotated and not folded else (None, None)
    return Origin(folded, model.merged_residual is not None, *coming)


def _inside_head(model: RotatedModel, token_ids: Tensor, work: Callable[[Readout], Tensor]) -> Tensor:
    """Return what `work` computes inside the head's call; a network's own output may be cast by a policy."""
    found: list[Tensor] = []

    def keep(readout: Readout) -> Tensor:
        found.append(work(readout))
        return readout.states.values

    read(model, token_ids, keep)
    return found[0]


def _likelihoods(readout: Readout, inputs: Tensor, rows: slice, targets: Tensor) -> Likelihoods:
    return likelihoods(_logits(readout, inputs, rows), targets[rows])


def _logits(readout: Readout, inputs: Tensor, rows: slice) -> Tensor:
    return readout.finish(readout.project(inputs[rows])).float()


def _nll(readout: Readout, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood of every token, (tokens,)."""
    inputs = readout.inputs()
    return torch.cat([_likelihoods(readout, inputs, rows, targets).nll for rows in readout.chunks()])


def _expect(readout: Readout, targets: Tensor, factor: float) -> tuple[Tensor, Expected]:
    """Return the negative log-likelihood of every token, (tokens,), and what is kept of its distribution."""
    inputs, found = readout.inputs(), []
    for rows in readout.chunks():
        read = _likelihoods(readout, inputs, rows, targets)
        mean = (read.weights @ readout.weight.float()) / read.total[:, None].float()
        bias = (
            torch.zeros_like(read.total) if readout.bias is None else read.weights @ readout.bias.float() / read.total
        )
        certainty = factor * (_dot(inputs[rows], mean) + bias) - read.normalizer
        found.append((read.nll, mean, bias.double(), certainty, read.likeliest))
    nll, *kept = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    return nll, Expected(*(each.cpu() for each in kept))


def _against(readout: Readout, expected: Expected, token_ids: Tensor) -> Tensor:
    """Return negative log-likelihood, divergence and agreement of every token, (tokens, 3)."""
    inputs, targets, factor, found = readout.inputs(), targets_of(token_ids), readout.factor(), []
    assert factor is not None, "distributions were kept of a head that is not linear"
    for rows in readout.chunks():
        read = _likelihoods(readout, inputs, rows, targets)
        mean_logit = factor * (_dot(inputs[rows], expected.rows[rows]) + expected.bias[rows])
        kl = expected.certainty[rows] - mean_logit + read.normalizer
        agreement = read.likeliest == expected.likeliest[rows]
        found.append(torch.stack([read.nll, kl, agreement.double()], dim=-1))
    return torch.cat(found)


def _beside(readout: Readout, states: FinalStates, token_ids: Tensor, *, teacher: RotatedModel | None) -> Tensor:
    """Return the same figures, of the float model's states read by the same head, or by its own where it has one."""
    targets = targets_of(token_ids)

    def compared(reference: Readout) -> Tensor:
        inputs, others = readout.inputs(), reference.inputs(states)
        found = [
            compare(_logits(readout, inputs, rows), _logits(reference, others, rows), targets[rows])
            for rows in readout.chunks()
        ]
        return torch.cat(found)

    if teacher is None:
        return compared(readout)
    found: list[Tensor] = []

    def keep(reference: Readout) -> Tensor:
        found.append(compared(reference))
        return states.values

    reread(teacher, states, keep)
    return found[0]


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return the products of rows, (rows, n) both, summed in float64."""
    return (one.double() * other.double()).sum(-1)
