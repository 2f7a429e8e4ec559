"""The exchange brings exactly what is needed, and its adjoint is its adjoint."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from convmesh.comm import Block, Halo, Held, count_traffic, give_back, line, start
from convmesh.geometry import HaloPlan, Interval, shards
from tests.compare import assert_close
from tests.harness import Pool

LINES = [((2,), (0,)), ((4,), (0,)), ((2, 2), (0, 1)), ((2, 2), (1,)), ((4, 1), (0, 1)), ((1, 4), (0, 1))]


def random_plan(seed: int, sizes: tuple[int, ...]) -> HaloPlan:
    """Any rank may need anything, in up to two parts, also over the ends."""
    rng = random.Random(seed)
    size = rng.randint(1, 14)
    owned = shards(size, sizes)
    needed = []
    for _ in owned:
        cut = sorted(rng.randint(-2, size + 2) for _ in range(4))
        parts = [Interval(cut[0], cut[1]), Interval(cut[2], cut[3])]
        needed.append(tuple(part for part in parts if part))
    return HaloPlan(size, owned, tuple(needed))


def gather(mesh: DeviceMesh, case: tuple[int, tuple[int, ...]]) -> None:
    """What each rank holds after the exchange is the global tensor there; and <F x, y> = <x, F* y>."""
    seed, mesh_dims = case
    along = line(mesh, mesh_dims)
    plan = random_plan(seed, along.sizes)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(3, plan.size, 2, generator=generator, dtype=torch.float64)
    own = plan.owned[along.rank]
    held = Held.own(whole.narrow(1, own.start, len(own)), (1,), (own,))
    with count_traffic() as traffic:
        (blocks,) = start([held], [Halo(0, plan, (Interval(0, plan.size),))], along).finish()
    held = held.plus(blocks)
    sent = sum(len(part) for _, part in plan.sends(along.rank))
    if len(along.sizes) == 1:
        assert traffic.bytes_sent == sent * 3 * 2 * 8, "only what is needed travels"
    assert traffic.exchanges == (0 if plan.silent else len(along.sizes))
    inner = torch.zeros((), dtype=torch.float64)
    cotangents = []
    for part in plan.needed[along.rank]:
        inside = part & Interval(0, plan.size)
        expected = torch.zeros(3, len(part), 2, dtype=torch.float64)
        if inside:
            place = expected.narrow(1, inside.start - part.start, len(inside))
            place.copy_(whole.narrow(1, inside.start, len(inside)))
        got = held.read((part,))
        assert torch.equal(got, expected)
        cotangent = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        cotangents.append(Block((part,), cotangent))
        inner += (got * cotangent).sum()
    zero = Block((Interval(-9, -9),), whole.new_zeros(3, 0, 2))
    adjoint = give_back(Held((1,), (*cotangents, zero)), 1, plan, along)
    other = (held.blocks[0].data * adjoint).sum()
    both = torch.stack([inner, other])
    for group in along.groups:
        torch.distributed.all_reduce(both, group=group)
    assert_close(both[0], both[1], scale=10.0)


@pytest.mark.parametrize(("mesh", "mesh_dims"), LINES)
def test_exchange_and_adjoint(pool: Pool, mesh: tuple[int, ...], mesh_dims: tuple[int, ...]) -> None:
    pool.run_cases(gather, [(seed, mesh_dims) for seed in range(25)], mesh=mesh)


def read_corners(mesh: DeviceMesh) -> Any:
    """Two dimensions exchanged one after the other bring the corners."""
    whole = torch.arange(7 * 9, dtype=torch.float64).view(7, 9)
    rows, columns = line(mesh, (0,)), line(mesh, (1,))
    own = (shards(7, (2,))[rows.rank], shards(9, (2,))[columns.rank])
    needed = tuple(Interval(max(0, i.start - 1), min(n, i.stop + 1)) for i, n in zip(own, whole.shape, strict=True))
    held = Held.own(whole[own[0].start : own[0].stop, own[1].start : own[1].stop], (0, 1), own)
    for axis, (along, n) in enumerate(((rows, 7), (columns, 9))):
        parts = shards(n, (2,))
        wide = tuple((Interval(max(0, i.start - 1), min(n, i.stop + 1)),) for i in parts)
        box = (*needed[:axis], *own[axis:])
        (blocks,) = start([held], [Halo(axis, HaloPlan(n, parts, wide), box)], along).finish()
        held = held.plus(blocks)
    expected = whole[needed[0].start : needed[0].stop, needed[1].start : needed[1].stop]
    assert torch.equal(held.read(needed), expected)


def test_corners(pool: Pool) -> None:
    pool.run(read_corners, mesh=(2, 2))


def test_reading_within_a_box_leaves_the_rest_zero() -> None:
    own = (Interval(2, 6),)
    held = Held.own(torch.arange(2.0, 6.0), (0,), own)
    assert held.read((Interval(1, 7),)).tolist() == [0, 2, 3, 4, 5, 0]
    assert held.read((Interval(1, 7),), within=(Interval(3, 4),)).tolist() == [0, 0, 3, 0, 0, 0]
    assert held.read((Interval(3, 5),)).data_ptr() == held.blocks[0].data[1:].data_ptr(), "one block is read as a view"
