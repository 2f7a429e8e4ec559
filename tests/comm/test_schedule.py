"""Every schedule brings exactly what is needed, and its transpose is its adjoint: <F x, y> = <x, F* y>."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh import _torch
from convmesh.comm import (
    Block,
    Halo,
    Held,
    count_traffic,
    fetch,
    give_back,
    halo,
    rank_line,
    start,
)
from convmesh.geometry import HaloPlan, Interval, Shards, volume
from tests.comm.schedules import LINES, MAKERS, Box, Listed
from tests.compare import assert_close
from tests.harness import Pool


def part_of(full: torch.Tensor, dims: tuple[int, ...], box: Box) -> torch.Tensor:
    """A box of a full tensor, with zeros where it overhangs."""
    inside = tuple(side & Interval(0, full.shape[dim]) for dim, side in zip(dims, box, strict=True))
    whole = Held.own(full, dims, tuple(Interval(0, full.shape[dim]) for dim in dims))
    return Held.own(whole.read(inside), dims, inside).read(box)


def nothing(full: torch.Tensor, dims: tuple[int, ...]) -> Block:
    """A block for a rank that has none."""
    shape = [0 if dim in dims else size for dim, size in enumerate(full.shape)]
    return Block((Interval(-9, -9),) * len(dims), full.new_zeros(shape))


def exchange(mesh: DeviceMesh, case: tuple[int, int, tuple[int, ...]]) -> None:
    """What each rank holds after the exchange is the full tensor there; and the adjoint law."""
    maker, seed, mesh_dims = case
    line = rank_line(mesh, mesh_dims)
    made = MAKERS[maker](random.Random(seed), line)
    generator = torch.Generator().manual_seed(seed)
    full = torch.randn(made.shape, generator=generator, dtype=torch.float64)
    own = [Block(box, part_of(full, made.dims, box)) for box in made.owned] or [nothing(full, made.dims)]
    held = Held(made.dims, tuple(own))
    with count_traffic() as traffic:
        (arrived,) = start(made.schedule, [held]).finish()
    if len(line.sizes) == 1:
        rest = prod(size for dim, size in enumerate(made.shape) if dim not in made.dims)
        sent = sum(volume(piece.box) for _, piece in made.schedule.sends) * rest
        assert traffic.bytes_sent == sent * 8, "only what is needed is sent"
    assert traffic.exchanges == (0 if made.schedule.silent else len(line.sizes))
    held = held.plus(arrived)
    inner = torch.zeros((), dtype=torch.float64)
    cotangents = []
    for box in made.needed:
        got = held.read(box)
        assert torch.equal(got, part_of(full, made.dims, box))
        cotangent = torch.randn(got.shape, generator=generator, dtype=torch.float64)
        cotangents.append(Block(box, cotangent))
        inner += (got * cotangent).sum()
    gradients = Held(made.dims, (*cotangents, nothing(full, made.dims)))
    other = torch.zeros((), dtype=torch.float64)
    totals = [Block(block.box, gradients.read(block.box).clone()) for block in own]
    start(made.schedule.transposed(), [gradients]).finish(accumulate=[Held(made.dims, tuple(totals))])
    for block, total in zip(own, totals, strict=True):
        other += (block.data * total.data).sum()
    both = torch.stack([inner, other])
    for group in line.groups:
        torch.distributed.all_reduce(both, group=group)
    assert_close(both[0], both[1], scale=100.0)


@pytest.mark.parametrize(("mesh", "mesh_dims"), LINES)
@pytest.mark.parametrize("maker", range(len(MAKERS)), ids=[make.__name__ for make in MAKERS])
def test_exchange_and_adjoint(pool: Pool, mesh: tuple[int, ...], mesh_dims: tuple[int, ...], maker: int) -> None:
    pool.run_cases(exchange, [(maker, seed, mesh_dims) for seed in range(25)], mesh=mesh)


def exchange_in_a_graph(mesh: DeviceMesh, case: tuple[int, int, tuple[int, ...]]) -> None:
    """A compiler's graph brings the same, and on every rank a result can be seen to be made of what was sent."""
    maker, seed, mesh_dims = case
    line = rank_line(mesh, mesh_dims)
    made = MAKERS[maker](random.Random(seed), line)
    full = torch.randn(made.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    own = [Block(box, part_of(full, made.dims, box)) for box in made.owned] or [nothing(full, made.dims)]
    (expected,) = start(made.schedule, [Held(made.dims, tuple(own))]).finish()

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        blocks = [Block(block.box, tensor) for block, tensor in zip(own, tensors, strict=True)]
        (arrived,) = start(made.schedule, [Held(made.dims, tuple(blocks))]).finish()
        return [*(block.data for block in arrived), _torch.after_the_last(tensors[0].sum())]

    graph = make_fx(run)(*[block.data for block in own])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    *found, _ = graph(*[block.data for block in own])
    assert all(torch.equal(one, block.data) for one, block in zip(found, expected, strict=True))
    sends = [node for node in graph.graph.nodes if "all_to_all" in str(node.target)]
    assert len(sends) == (0 if made.schedule.silent else len(line.sizes))
    assert all(any(origin.op == "placeholder" for origin in origins(node)) for node in sends)


def origins(node: Node) -> set[Node]:
    found, ahead = {node}, [node]
    while ahead:
        new = set(ahead.pop().all_input_nodes) - found
        found |= new
        ahead += new
    return found


@pytest.mark.parametrize(("mesh", "mesh_dims"), LINES)
def test_exchange_in_a_graph(pool: Pool, mesh: tuple[int, ...], mesh_dims: tuple[int, ...]) -> None:
    cases = [(maker, seed, mesh_dims) for maker in range(len(MAKERS)) for seed in range(4)]
    pool.run_cases(exchange_in_a_graph, cases, mesh=mesh)


def read_corners(mesh: DeviceMesh) -> Any:
    """Two dimensions exchanged one after the other bring the corners; the adjoint takes them back."""
    full = torch.arange(7 * 9, dtype=torch.float64).view(7, 9)
    rows, columns = rank_line(mesh, (0,)), rank_line(mesh, (1,))
    own = (Shards(7, (2,))[rows.rank], Shards(9, (2,))[columns.rank])
    needed = tuple(Interval(max(0, i.start - 1), min(n, i.stop + 1)) for i, n in zip(own, full.shape, strict=True))
    held = Held.own(full[own[0].start : own[0].stop, own[1].start : own[1].stop], (0, 1), own)
    for axis, (line, n) in enumerate(((rows, 7), (columns, 9))):
        wide = tuple((Interval(max(0, i.start - 1), min(n, i.stop + 1)),) for i in Shards(n, (2,)))
        box = (*needed[:axis], *own[axis:])
        schedule = halo(line, Halo(axis, HaloPlan(Shards(n, (2,)), Listed(wide)), box))
        held = held.plus(start(schedule, [held]).finish()[0])
    expected = full[needed[0].start : needed[0].stop, needed[1].start : needed[1].stop]
    assert torch.equal(held.read(needed), expected)


def test_corners(pool: Pool) -> None:
    pool.run(read_corners, mesh=(2, 2))


def give_back_what_came(mesh: DeviceMesh) -> None:
    """Of several tensors in one message, and with the helpers for one tensor."""
    line = rank_line(mesh, (0,))
    plan = HaloPlan(Shards(8, (4,)), Listed(tuple((Interval(2 * r - 1, 2 * r + 3),) for r in range(4))))
    own, whole = plan.owned[line.rank], Interval(0, 8)
    schedule = halo(line, Halo(0, plan, (whole,)), Halo(0, plan, (whole,)))
    parts = [torch.arange(8.0)[own.start : own.stop], 10 + torch.arange(8.0)[own.start : own.stop].repeat(3, 1)]
    held = [Held.own(parts[0], (0,), (own,)), Held.own(parts[1], (1,), (own,))]
    with count_traffic() as traffic:
        arrived = start(schedule, held).finish()
    assert traffic.exchanges == 1
    need = plan.needed.parts(line.rank)[0] & whole
    got = [one.plus(blocks).read((need,)) for one, blocks in zip(held, arrived, strict=True)]
    assert got[0].tolist() == list(range(need.start, need.stop))
    assert torch.equal(got[1], 10 + got[0].expand(3, -1))
    single = halo(line, Halo(0, plan, (whole,)))
    assert torch.equal(fetch(single, parts[0], (0,), (own,), (need,)), got[0])
    readers = [sum(index in (p & whole) for (p,) in map(plan.needed.parts, range(4))) for index in range(8)]
    counted = give_back(single, Held.own(torch.ones(len(need)), (0,), (need,)), (own,))
    assert counted.tolist() == readers[own.start : own.stop]


def test_several_tensors_in_one_message(pool: Pool) -> None:
    pool.run(give_back_what_came, mesh=(4,))


def test_reading_within_a_box_leaves_the_rest_zero() -> None:
    own = (Interval(2, 6),)
    held = Held.own(torch.arange(2.0, 6.0), (0,), own)
    assert held.read((Interval(1, 7),)).tolist() == [0, 2, 3, 4, 5, 0]
    assert held.read((Interval(1, 7),), within=(Interval(3, 4),)).tolist() == [0, 0, 3, 0, 0, 0]
    assert held.read((Interval(3, 5),)).data_ptr() == held.blocks[0].data[1:].data_ptr(), "one block is read as a view"
