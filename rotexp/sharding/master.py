"""ZeRO-2 for whole compute weights: their fp32 master, its gradient and AdamW's moments are split over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rotexp.errors.requirements import require
from rotexp.sharding.buckets import Bucket, lay_out
from rotexp.sharding.communication import Communication
from rotexp.sharding.replicas import compare, copy_first
from rotexp.sharding.split_vector import SplitVector

LOGGER = logging.getLogger(__name__)


class ZeRO2Master:
    """The fp32 master of parameters that are whole on every rank, of which this rank keeps and updates one shard.

    The parameters lie end to end in one vector, cut into buckets; rank r owns the r-th piece of every bucket. A step is
    backward (`accumulate` after every part but the last), `reduce`, clip, the optimizer's step on `shard`, `publish`.
    Every method but `accumulate`, `discard` and `pieces` takes all ranks.

    Attributes:
        shard: float32 (shard size,), this rank's pieces one after the other.
        layout: where each parameter lies.
        simulated: whether this is rank 0 of a larger world that does not exist; most weights then never change.
        num_spills: how often the gradients of a part were summed into host memory.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        communication: Communication,
        bucket_mib: float,
        sim_world: int | None = None,
    ) -> None:
        """Build the master of the weights that the model holds.

        Args:
            names: of the trained parameters, whole on every rank and of any floating dtype, in their order; a tied
                one by one of its names. The objects may be replaced later, their shapes and dtypes not.
            bucket_mib: size of a bucket in MiB of float32.
            sim_world: keep and update what rank 0 of that many ranks would, without collectives.

        Raises:
            ValueError: `sim_world` in a world of several ranks.
        """
        world = communication.world_size
        allowed, remedy = f"null in a world of {world} ranks", "leave it out, or set launch.nproc=1"
        require(sim_world is None or world == 1, "sharding.sim_world", sim_world, allowed, remedy)
        parameters = {name: model.get_parameter(name) for name in names}
        assert len(set(parameters.values())) == len(names) > 0, "each trained parameter by one name, once"
        self.model = model
        self.communication = communication
        self.simulated = sim_world is not None
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.layout = lay_out(shapes, world=sim_world or world, bucket_mib=bucket_mib)
        device = parameters[names[0]].device
        self.shard = nn.Parameter(torch.zeros(self.layout.shard_size, dtype=torch.float32, device=device))
        self.num_spills = 0
        self._sums: list[Tensor | None] = [None] * len(self.layout.buckets)
        self.rebuild()

    @torch.no_grad()
    def rebuild(self) -> None:
        """Set the weights of all ranks and the master to what rank 0's model holds now, as after loading.

        One collective where all ranks hold the same, and one more a weight where they do not.
        """
        weights = {name: self.model.get_parameter(name).detach() for name in self.layout.shapes}
        strayed = compare(weights, communication=self.communication)
        if strayed.names:
            LOGGER.warning("%s; all ranks take the first's", strayed.line())
        copy_first({name: weights[name] for name in strayed.names}, communication=self.communication)
        for bucket, piece in self._by_bucket(self.shard.detach()):
            values = self._zeros(bucket)
            for span in bucket.spans:
                values[span.in_bucket] = self._weight(span.name)[span.in_parameter]
            piece.copy_(values.view(self.layout.world, -1)[self.communication.rank])

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add every gradient in float32 to sums in host memory, and free it for the backward of the next part."""
        for index, bucket in enumerate(self.layout.buckets):
            self._sums[index] = _to_host(self._take_gradients(index, bucket))
        self.num_spills += 1

    @torch.no_grad()
    def reduce(self) -> None:
        """Set the gradient of `shard` to the mean over ranks of the whole step's gradients, and free those.

        One reduce-scatter a bucket, in float32. Where a rank has no gradient it counts as zeros.
        """
        self.shard.grad = None  # of the step before, lest both take memory
        gradient = torch.empty_like(self.shard)
        for index, (bucket, piece) in enumerate(self._by_bucket(gradient)):
            values = self._take_gradients(index, bucket)
            if self.simulated:
                piece.copy_(values[: bucket.width])
            else:
                self.communication.reduce_scatter(piece, values).div_(self.communication.world_size)
        self.shard.grad = gradient

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """Return the sum of squares of the whole reduced gradient, a float32 scalar of the same bits on every rank.

        One all-reduce, of one number for each rank: zeros added to a number keep its bits in whatever order they come,
        and all ranks then sum alike.
        """
        gradient = self.shard.grad
        assert gradient is not None, "reduce comes first"
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for _, piece in self._by_bucket(gradient)]
        parts = torch.zeros(self.communication.world_size, dtype=torch.float64, device=gradient.device)
        parts[self.communication.rank] = torch.stack(norms).square().sum()
        return self.communication.reduce_(parts).sum().float()

    @torch.no_grad()
    def publish(self) -> None:
        """Set every compute weight to its master in the weight's dtype, bit for bit; one all-gather a bucket."""
        for bucket, piece in self._by_bucket(self.shard.detach()):
            values = self._gather(piece.to(self._dtype(bucket)))
            for span in bucket.spans:
                part = values[span.in_bucket]  # of a simulated rank, only what it owns
                self._weight(span.name)[span.start : span.start + len(part)] = part

    def discard(self) -> None:
        """Drop the gradients of the step in progress, wherever they are."""
        for name in self.layout.shapes:
            self.model.get_parameter(name).grad = None
        self._sums = [None] * len(self._sums)
        self.shard.grad = None

    @torch.no_grad()
    def full(self, flat: Tensor | None = None) -> dict[str, Tensor]:
        """Gather the whole master by parameter name, each in its shape: host tensors on rank 0, nothing elsewhere.

        Args:
            flat: (shard size,), what to gather instead, such as a moment or an average of `shard`.

        Raises:
            ValueError: the other ranks are simulated.
        """
        shown, allowed = self.layout.world if self.simulated else None, "null where the whole master is asked for"
        require(not self.simulated, "sharding.sim_world", shown, allowed, "run it on that many ranks instead")
        flat = self.shard.detach() if flat is None else flat
        first = self.communication.rank == 0
        shapes = self.layout.shapes.items() if first else ()
        whole = {name: torch.empty(shape, dtype=flat.dtype, device="cpu") for name, shape in shapes}
        for bucket, piece in self._by_bucket(flat):
            values = self._gather(piece)
            for span in bucket.spans if first else ():
                whole[span.name].view(-1)[span.in_parameter] = values[span.in_bucket].cpu()
        return whole

    def pieces(self, flat: Tensor) -> SplitVector:
        """Return this rank's pieces of the unpadded vector of all parameters, sharing the memory of `flat`.

        Args:
            flat: (shard size,), `shard` or what goes with it: a moment, an average.
        """
        offsets, tensors = [], []
        for bucket, piece in self._by_bucket(flat.detach()):
            offset = bucket.start + self.communication.rank * bucket.width
            if offset < self.layout.size:
                offsets.append(offset)
                tensors.append(piece[: self.layout.size - offset])
        return SplitVector(self.layout.size, offsets, tensors)

    def _take_gradients(self, index: int, bucket: Bucket) -> Tensor:
        """Return a bucket's gradients of all parts until now, summed in float32, and free them."""
        kept, self._sums[index] = self._sums[index], None
        values = self._zeros(bucket) if kept is None else kept.to(self.shard.device, non_blocking=True)
        for span in bucket.spans:
            parameter = self.model.get_parameter(span.name)
            if parameter.grad is not None:
                values[span.in_bucket] += parameter.grad.reshape(-1)[span.in_parameter]
            if span.last:
                parameter.grad = None
        return values

    def _gather(self, piece: Tensor) -> Tensor:
        """Return the bucket of which this is a piece; of a simulated rank it alone, in a bucket's memory."""
        whole = piece.new_empty(self.layout.world * len(piece))
        if self.simulated:
            return whole[: len(piece)].copy_(piece)
        return self.communication.all_gather(whole, piece)

    def _by_bucket(self, flat: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        buckets = self.layout.buckets
        return zip(buckets, torch.split(flat, [bucket.width for bucket in buckets]), strict=True)

    def _zeros(self, bucket: Bucket) -> Tensor:
        return self.shard.detach().new_zeros(self.layout.world * bucket.width)

    def _weight(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().view(-1)

    def _dtype(self, bucket: Bucket) -> torch.dtype:
        """Return the dtype to publish in: that of the weights, or the master's where theirs differ."""
        dtypes = {self.model.get_parameter(span.name).dtype for span in bucket.spans}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
