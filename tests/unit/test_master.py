"""The ZeRO-2 master's layout, its arithmetic in a world of one, and one rank of a world that does not exist."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotexp.sharding.buckets import Layout, lay_out
from rotexp.sharding.communication import Communication
from rotexp.sharding.master import ZeRO2Master

BUCKET_MIB = 2.0**-14  # 16 numbers
SHAPES = ([(37, 6), (11,), (1,), (6, 11)], [(1,)], [(3,), (1,), (2,)], [(16,), (32,)], [(1000,), (7, 9)])


def make_model(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> nn.Module:
    """A head tied to its embedding, and parameters of 1 to 222 numbers; 301 in all."""
    model = nn.Module()
    model.embedding = nn.Embedding(37, 6)
    model.head = nn.Linear(6, 37, bias=False)
    model.head.weight = model.embedding.weight
    model.inner = nn.Linear(6, 11)
    model.gain = nn.Parameter(torch.empty(1))
    model.gate = nn.Parameter(torch.empty(1, 1))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model.to(dtype)


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def make_master(model: nn.Module, *, communication: Communication | None = None, **options: Any) -> ZeRO2Master:
    options = {"bucket_mib": BUCKET_MIB} | options
    return ZeRO2Master(model, names(model), communication=communication or Communication(), **options)


def give_gradients(model: nn.Module, *, seed: int, without: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.grad = None if name == without else gradient


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def owned(layout: Layout, *, rank: int) -> Tensor:
    """Say of each number of the vector whether the rank owns it, counting from the definition."""
    rank_of = []
    for start in range(0, layout.size, layout.bucket_numel):
        numel = min(layout.bucket_numel, layout.size - start)
        rank_of += [index // -(-numel // layout.world) for index in range(numel)]
    return torch.tensor(rank_of) == rank


def layouts() -> Iterator[Layout]:
    for shapes in SHAPES:
        named = {f"p{index}": torch.Size(shape) for index, shape in enumerate(shapes)}
        for world in (1, 2, 3, 4, 7):
            yield lay_out(named, world=world, bucket_mib=BUCKET_MIB)


def test_buckets_hold_every_number_once_and_in_order() -> None:
    for layout in layouts():
        found = []
        for bucket in layout.buckets:
            assert bucket.start == len(found)
            for span in bucket.spans:
                assert bucket.start + span.in_bucket.start == len(found)
                assert span.in_bucket.stop <= layout.bucket_numel
                numel = layout.shapes[span.name].numel()
                assert span.last is (span.in_parameter.stop == numel)
                found += [(span.name, index) for index in range(numel)[span.in_parameter]]
        assert found == [(name, index) for name, shape in layout.shapes.items() for index in range(shape.numel())]


def test_every_bucket_is_split_evenly_and_only_the_last_is_padded() -> None:
    for layout in layouts():
        *full, last = [bucket.width * layout.world for bucket in layout.buckets]
        assert full == [layout.bucket_numel] * len(full)
        assert 0 <= sum(full) + last - layout.size < layout.world
        assert layout.shard_size == sum(bucket.width for bucket in layout.buckets)


@pytest.mark.parametrize(
    ("world", "mib", "numel"), [(1, 1, 2**18), (3, 1, 2**18 - 1), (4, 64, 2**24), (40, 2**-14, 40)]
)
def test_a_bucket_is_of_so_many_mebibytes_of_float32(world: int, mib: float, numel: int) -> None:
    assert lay_out({"p": torch.Size([5])}, world=world, bucket_mib=mib).bucket_numel == numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("options", "exact"), [({"foreach": True}, True), ({}, True), ({"fused": True}, False)])
def test_training_equals_adamw_on_the_whole_model(dtype: torch.dtype, options: dict[str, bool], exact: bool) -> None:
    """Fused AdamW rounds the ends of a tensor otherwise than its middle, which is another place here."""
    model, plain = make_model(dtype), make_model(dtype).float()
    master = make_master(model)
    optimizer = torch.optim.AdamW([master.shard], lr=1e-2, weight_decay=0.1, **options)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, **options)
    tolerance = 0.0 if exact else 1e-6
    for step in range(8):
        give_gradients(model, seed=step)
        for name, parameter in plain.named_parameters():
            parameter.grad = model.get_parameter(name).grad.float()
        master.reduce()
        optimizer.step()
        expected.step()
        master.publish()
        whole = master.full()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(whole[name], parameter.detach(), rtol=tolerance, atol=tolerance)
            assert torch.equal(model.get_parameter(name), whole[name].to(dtype))


def test_one_bucket_of_a_mebibyte_holds_what_many_small_ones_do() -> None:
    found = []
    for bucket_mib in (1, BUCKET_MIB):
        model = make_model()
        master = make_master(model, bucket_mib=bucket_mib)
        give_gradients(model, seed=0)
        master.reduce()
        torch.optim.AdamW([master.shard], lr=0.1).step()
        master.publish()
        found.append(flat(model))
    assert torch.equal(*found)
    assert not torch.equal(found[0], flat(make_model()))


def test_weights_of_several_dtypes_each_hold_the_cast_of_their_master() -> None:
    model = make_model(torch.bfloat16)
    model.inner.to(torch.float16)
    master = make_master(model, bucket_mib=1)
    with torch.no_grad():
        master.shard.copy_(torch.randn(301, generator=torch.Generator().manual_seed(3)))
    master.publish()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16, torch.float16}
    for name, whole in master.full().items():
        assert torch.equal(model.get_parameter(name), whole.to(model.get_parameter(name).dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_summed_in_float32_and_spills_counted(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    master = make_master(model)
    expected = torch.zeros(301)
    for part in range(3):
        give_gradients(model, seed=part, without="gain" if part else "")
        expected += torch.cat(
            [
                (torch.zeros(p.shape) if p.grad is None else p.grad.float()).reshape(-1)
                for p in (model.get_parameter(name) for name in names(model))
            ]
        )
        if part < 2:
            master.accumulate()
            assert all(parameter.grad is None for parameter in model.parameters())
    assert master.num_spills == 2
    master.reduce()
    assert torch.equal(master.shard.grad, expected)
    assert all(parameter.grad is None for parameter in model.parameters())
    give_gradients(model, seed=9)
    expected = torch.cat([parameter.grad.float().reshape(-1) for parameter in model.parameters()])
    master.reduce()
    assert torch.equal(master.shard.grad, expected), "sums of the step before must be gone"
    assert master.num_spills == 2


def test_gradients_are_freed_while_buckets_are_reduced() -> None:
    class Watching(Communication):
        def reduce_scatter(self, piece: Tensor, whole: Tensor) -> Tensor:
            assert master.shard.grad is None, "the gradient of the step before must be gone"
            alive.append([name for name, parameter in model.named_parameters() if parameter.grad is not None])
            return super().reduce_scatter(piece, whole)

    alive: list[list[str]] = []
    model = make_model()
    master = make_master(model, communication=Watching())
    master.reduce()
    alive.clear()
    give_gradients(model, seed=0)
    order = names(model)
    master.reduce()
    ends = torch.tensor([parameter.numel() for parameter in model.parameters()]).cumsum(0).tolist()
    assert order == ["gain", "gate", "embedding.weight", "inner.weight", "inner.bias"]
    assert alive == [
        [name for name, end in zip(order, ends, strict=True) if end > stop]
        for stop in (min(301, start + 16) for start in range(0, 301, 16))
    ]


def test_a_gradient_in_another_memory_order_is_taken_by_its_values() -> None:
    model = make_model()
    master = make_master(model)
    transposed = torch.arange(66.0).reshape(6, 11).t()
    model.inner.weight.grad = transposed
    master.reduce()
    assert torch.equal(master.full(master.shard.grad)["inner.weight"], transposed)


def test_the_squared_norm_is_that_of_the_gradient_in_float64() -> None:
    model = make_model()
    model.big = nn.Parameter(torch.zeros(300_000))
    master = make_master(model, bucket_mib=1)
    give_gradients(model, seed=0)
    exact = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
    master.reduce()
    found = master.squared_norm()
    assert len(master.layout.buckets) == 2
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert found.item() == pytest.approx(exact, rel=1e-7)


def test_discard_drops_all_of_a_step() -> None:
    model = make_model()
    master = make_master(model)
    give_gradients(model, seed=0)
    master.reduce()
    give_gradients(model, seed=1)
    master.accumulate()
    give_gradients(model, seed=2)
    master.discard()
    assert master.shard.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    master.reduce()
    assert torch.equal(master.shard.grad, torch.zeros(301))


def test_the_master_is_rebuilt_from_the_weights_held_then() -> None:
    model, other = make_model(), make_model(seed=1)
    master = make_master(model)
    assert torch.equal(master.shard.detach(), flat(model))
    model.inner, model.gain = other.inner, other.gain
    model.load_state_dict(other.state_dict())
    master.rebuild()
    assert torch.equal(master.shard.detach(), flat(other))


def test_pieces_share_the_memory_of_the_shard() -> None:
    master = make_master(make_model())
    pieces = master.pieces(master.shard)
    assert pieces.size == 301
    assert pieces.offsets == list(range(0, 301, 16))
    assert [len(piece) for piece in pieces.tensors] == [16] * 18 + [13]
    pieces.tensors[1][2] = 7.0
    assert master.shard[18] == 7.0


def test_a_parameter_under_two_names_is_refused() -> None:
    model = make_model()
    for twice in (["gain", "gain"], ["embedding.weight", "head.weight"]):
        with pytest.raises(AssertionError, match="by one name, once"):
            ZeRO2Master(model, twice, communication=Communication(), bucket_mib=1)


@pytest.mark.parametrize("sim_world", [2, 4, 7, 400])
def test_a_simulated_rank_updates_what_rank_0_would_and_nothing_else(sim_world: int) -> None:
    model, plain = make_model(), make_model()
    communication = Communication()
    master = make_master(model, communication=communication, sim_world=sim_world)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW([master.shard], lr=1e-2)
    mine = owned(master.layout, rank=0)
    for step in range(3):
        for each in (model, plain):
            give_gradients(each, seed=step)
        master.reduce()
        norm = flat_gradient(plain)[mine].square().sum()
        torch.testing.assert_close(master.squared_norm(), norm)
        optimizer.step()
        expected.step()
        master.publish()
    assert master.simulated
    assert master.shard.numel() == -(-301 // sim_world)
    assert torch.equal(flat(model)[mine], flat(plain)[mine])
    assert torch.equal(flat(model)[~mine], flat(make_model())[~mine])
    assert communication.num_collectives == 0
    assert sum(len(piece) for piece in master.pieces(master.shard).tensors) == mine.sum()


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def test_a_simulated_rank_cannot_give_the_whole_master() -> None:
    master = make_master(make_model(), sim_world=4)
    with pytest.raises(ValueError, match=r"^sharding\.sim_world=4: must be null .*; run it on that many ranks"):
        master.full()


def test_a_world_of_several_ranks_simulates_no_other() -> None:
    communication = Communication()
    communication.world_size = 2
    with pytest.raises(ValueError, match=r"^sharding\.sim_world=4: must be null in a world of 2 ranks; leave it out"):
        make_master(make_model(), communication=communication, sim_world=4)
    assert not make_master(make_model()).simulated
