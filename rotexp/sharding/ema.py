"""An exponential moving average of what is trained, of which each rank keeps only its own shards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rotexp.orthogonal.stiefel import polar_projection
from rotexp.sharding.communication import Communication
from rotexp.sharding.local_rows import local_rows, reshard
from rotexp.sharding.master import ZeRO2Master
from rotexp.sharding.split_vector import SplitVector

MASTER = "master"
"""What states call the ZeRO-2 master's shard."""
NUM_UPDATES = "num_updates"


class ShardedEMA:
    """Shadows of a model's trained parameters and persistent buffers, as of `decay * shadow + (1 - decay) * value`.

    Shadows are float32 (float64 of what is float64) and lie where their values do. Buffers that are not floating-point
    are not averaged but copied; those that are not persistent are left alone. Values are looked up by name at every
    use, since FSDP replaces parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        decay: float,
        rotations: Collection[str],
        communication: Communication,
        master: ZeRO2Master | None = None,
    ) -> None:
        """Start from the values of now.

        Args:
            names: of the trained parameters, without those that `master` holds.
            rotations: those of the names whose average is projected onto the orthogonal group when it is used.
            master: averaged as a whole, in its float32, instead of its compute weights.
        """
        assert set(rotations) <= set(names), "a rotation that is not trained needs no average"
        self.decay = decay
        self._model = model
        self._names = tuple(names)
        self._buffers = tuple(_persistent_buffers(model))
        self._rotations = tuple(sorted(rotations))
        self._master = master
        self._communication = communication
        self._shadows = {name: _shadow(value) for name, value in self._values().items()}
        self._num_updates = torch.zeros((), dtype=torch.int64)

    @property
    def num_updates(self) -> int:
        """How often the average was updated."""
        return int(self._num_updates)

    @torch.no_grad()
    def update(self) -> None:
        """Move every shadow towards its value, on this rank alone; once after each optimizer step."""
        pairs = [(local_rows(self._shadows[name]), local_rows(value)) for name, value in self._values().items()]
        averaged = [(shadow, value) for shadow, value in pairs if shadow.is_floating_point()]
        alike = [(shadow, value) for shadow, value in averaged if shadow.dtype == value.dtype]
        if alike:
            torch._foreach_lerp_([shadow for shadow, _ in alike], [value for _, value in alike], 1.0 - self.decay)
        for shadow, value in averaged:
            if shadow.dtype != value.dtype:
                shadow.lerp_(value.to(shadow.dtype), 1.0 - self.decay)
        for shadow, value in pairs:
            if not shadow.is_floating_point():
                shadow.copy_(value)
        self._num_updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Hold the averages in the model (and its master) inside the block, and the live values, bit for bit, after it.

        All ranks enter together; leaving takes no collective, so that a rank may leave alone by an exception.
        """
        values = self._live()
        kept = {name: local_rows(value).clone() for name, value in values.items()}
        try:
            self._write({name: local_rows(self._shadows[name]) for name in self._shadows} | self.rotations())
            if self._master is not None:
                self._master.publish()
            yield
        finally:
            self._write(kept)

    def rotations(self) -> dict[str, Tensor]:
        """Return the averaged rotations, each the orthogonal matrix nearest to its average."""
        with torch.no_grad(), self._communication.equal_threads():
            return {name: polar_projection(self._shadows[name]) for name in self._rotations}

    def state(self) -> dict[str, Tensor | SplitVector]:
        """Return the shadows and the count of updates, sharded as what they are of, to save and to load in place."""
        state: dict[str, Tensor | SplitVector] = dict(self._shadows)
        if self._master is not None:
            state[MASTER] = self._master.pieces(self._shadows[MASTER])
        return {**state, NUM_UPDATES: self._num_updates}

    def _values(self) -> dict[str, Tensor]:
        """Return what is averaged or copied, as it is now."""
        reshard(self._model)  # after an evaluation the root's parameters are whole copies, not the shards
        values: dict[str, Tensor] = {name: self._model.get_parameter(name).detach() for name in self._names}
        values |= {name: self._model.get_buffer(name) for name in self._buffers}
        return values if self._master is None else {**values, MASTER: self._master.shard.detach()}

    def _live(self) -> dict[str, Tensor]:
        """Return all that `applied` overwrites: the values, and the compute weights of the master."""
        names = () if self._master is None else self._master.layout.shapes
        return self._values() | {name: self._model.get_parameter(name).detach() for name in names}

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        live = self._live()
        for name, value in values.items():
            local_rows(live[name]).copy_(value)


def _shadow(value: Tensor) -> Tensor:
    """Return a copy, sharded alike; in float32 if it is of a smaller floating dtype."""
    dtype = torch.promote_types(value.dtype, torch.float32) if value.is_floating_point() else value.dtype
    return value.detach().to(dtype, copy=True)


def _persistent_buffers(model: nn.Module) -> Iterator[str]:
    for prefix, module in model.named_modules():
        for name, _ in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name
