"""How many collectives an operator starts: at most as many as stock DTensor, or there is a reason next to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.compare import assert_close
from tests.harness import Pool

PRINTED = "one rank alone may print a loss: sums, means and extremes of a shard are reduced at once"
AGREED = "one number tells all ranks whether an index was bad, so that all raise; the input is resharded, not gathered"
SHARED = "a reduce-scatter of the bias lets the ranks share the product, which stock computes on each of them"


@dataclass(frozen=True)
class Case:
    name: str
    call: Callable[..., Any]
    at: tuple[str, ...]  # 'R', a dimension, or the reduction of a Partial operand
    more: int = 0  # than stock
    why: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    stays: str = ""  # the reduction of the result, which is still to be done


def index(at: str, size: int = 4) -> str:
    return f"{at} below {size}"


CASES = [
    Case("neg of a sum", lambda p: -p, ("sum",), stays="sum"),
    Case("neg of an average", lambda p: -p, ("avg",), stays="avg"),
    Case("neg of a maximum", lambda p: -p, ("max",), stays="min"),
    Case("Partial + Replicate", lambda p, r: p + r, ("sum", "R"), stays="sum"),
    Case("Replicate - Partial", lambda r, p: r - 2 * p, ("R", "sum"), stays="sum"),
    Case("an average + Replicate", lambda p, r: p + r, ("avg", "R"), stays="avg"),
    Case("Partial + Partial", lambda p, q: p + q, ("sum", "sum"), stays="sum"),
    Case("Partial + Shard", lambda p, s: p + s, ("sum", "0")),
    Case("Partial + a small Replicate", lambda p, r: p + r, ("sum", "R"), shapes=((4, 4), (4,)), stays="sum"),
    Case("a small Partial + Replicate", lambda p, r: p + r, ("sum", "R"), more=1, shapes=((4,), (4, 4)),
         why="4 numbers are reduced now, in place of 16 later"),
    Case("where", lambda p, r: torch.where(r > 0, p, r), ("sum", "R"), stays="sum"),
    Case("add_", lambda p, r: p.clone().add_(r), ("sum", "R"), stays="sum"),
    Case("lerp", lambda p, r: torch.lerp(p, r, 0.3), ("sum", "R"), stays="sum"),
    Case("a number added", lambda p: p + 1, ("sum",)),
    Case("foreach neg", lambda p, q: torch._foreach_neg([p, q]), ("sum", "sum"), stays="sum"),
    Case("foreach mul", lambda p, q: torch._foreach_mul([p, q], 2.0), ("sum", "sum"), stays="sum"),
    Case("foreach add", lambda p, q: torch._foreach_add([p], [q]), ("sum", "sum"), stays="sum"),
    Case("foreach div_", lambda p: torch._foreach_div_([p], 2.0) or p, ("sum",), stays="sum"),
    Case("foreach exp", lambda p, q: torch._foreach_exp([p, q]), ("sum", "sum")),
    Case("max of a maximum", lambda p: p.max(), ("max",), stays="max"),
    Case("min of a minimum", lambda p: p.min(), ("min",), stays="min"),
    Case("amax of a maximum", lambda p: p.amax(0), ("max",), stays="max"),
    Case("max of a sum", lambda p: p.max(), ("sum",)),
    Case("sum of a sum", lambda p: p.sum(1), ("sum",), stays="sum"),
    Case("mean of an average", lambda p: p.mean(), ("avg",), stays="avg"),
    Case("sum of a shard", lambda s: s.sum(), ("0",), more=1, why=PRINTED),
    Case("mean of a shard", lambda s: s.mean(), ("0",), more=1, why=PRINTED),
    Case("max of a shard", lambda s: s.max(), ("0",), more=1, why=PRINTED),
    Case("pad of a sum", lambda p: F.pad(p, (1, 2), value=5.0), ("sum",), stays="sum"),
    Case("pad of an average", lambda p: F.pad(p, (1, 2), value=5.0), ("avg",), stays="avg"),
    Case("pad of a maximum", lambda p: F.pad(p, (1, 2), value=5.0), ("max",), stays="max"),
    Case("pad of a minimum", lambda p: F.pad(p, (1, 2), value=-5.0), ("min",), stays="min"),
    Case("addmm, summed over", lambda p, a, b: torch.addmm(p, a, b), ("sum", "1", "0"), stays="sum"),
    Case("addmm, a Partial row", torch.addmm, ("sum", "1", "0"), shapes=((4,), (4, 4), (4, 4)), stays="sum"),
    Case("addmm, replicated factors", torch.addmm, ("sum", "R", "R"), more=1, why=SHARED),
    Case("gather, sharded indices", lambda x, i: x.gather(0, i), ("R", index("0")), more=1, why=AGREED),
    Case("gather, sharded beside", lambda x, i: x.gather(1, i), ("0", index("0")), more=1, why=AGREED),
    Case("gather, replicated indices", lambda x, i: x.gather(0, i), ("0", index("R")), more=1, why=AGREED),
]  # fmt: skip


def terms(number: int, rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * number + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def operand(mesh: DeviceMesh, number: int, at: str, shape: tuple[int, ...]) -> tuple[DTensor, torch.Tensor]:
    """On the mesh, and all of it."""
    if at in ("sum", "avg", "max", "min"):
        every = torch.stack([terms(number, rank, shape) for rank in range(mesh.size())])
        dense = {"sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0)}[at]
        return DTensor.from_local(every[mesh.get_local_rank()].clone(), mesh, [Partial(at)], run_check=False), dense
    place, _, size = at.partition(" below ")
    dense = terms(number, 0, shape)
    if size:
        dense = (dense.abs() * 100).long() % int(size)
    return distribute_tensor(dense, mesh, [Replicate() if place == "R" else Shard(int(place))]), dense.clone()


def run(mesh: DeviceMesh, case: Case) -> tuple[int, list[Any], list[Any]]:
    """The number of collectives, the results, and what one process has."""
    shapes = case.shapes or ((4, 4),) * len(case.at)
    given = [operand(mesh, number, *one) for number, one in enumerate(zip(case.at, shapes, strict=True))]
    with CommDebugMode() as counted:
        results = case.call(*(placed for placed, _ in given))
    wanted = case.call(*(dense for _, dense in given))
    return counted.get_total_counts(), *(list(r) if isinstance(r, list | tuple) else [r] for r in (results, wanted))


def count(mesh: DeviceMesh, number: int) -> None:
    case = CASES[number]
    stock, *_ = run(mesh, case)
    with convmesh.enable():
        ours, results, wanted = run(mesh, case)
        assert ours <= stock + case.more, f"{case.name}: {ours} collectives, and stock has {stock}"
        assert not case.more or case.why
        for mine, dense in zip(results, wanted, strict=True):
            (placement,) = mine.placements
            assert (placement.reduce_op if isinstance(placement, Partial) else "") == case.stays, case.name
            assert_close(mine.full_tensor(), dense)


def test_no_more_collectives_than_stock(pool: Pool) -> None:
    pool.run_cases(count, range(len(CASES)), mesh=(2,))


def layer_norm(mesh: DeviceMesh) -> None:
    counts = []
    for switch in (False, True):
        x = distribute_tensor(terms(0, 0, (4, 4, 8)), mesh, [Shard(0)]).requires_grad_()
        weight, bias = (
            distribute_tensor(terms(number, 0, (8,)), mesh, [Replicate()]).requires_grad_() for number in (1, 2)
        )
        gradient = distribute_tensor(terms(3, 0, (4, 4, 8)), mesh, [Shard(0)])
        if switch:
            convmesh.enable()
        try:
            with CommDebugMode() as counted:
                F.layer_norm(x, (8,), weight, bias).backward(gradient)
        finally:
            if switch:
                convmesh.disable()
        counts.append(counted.get_total_counts())
    assert counts[1] <= counts[0], counts


def test_layer_norm_and_its_gradient(pool: Pool) -> None:
    pool.run(layer_norm, mesh=(2,))


def use_loss(mesh: DeviceMesh) -> None:
    """One reduction, at once; then every rank, or one alone, does with a loss what people do."""
    with convmesh.enable():
        x = distribute_tensor(terms(0, 0, (6, 5)), mesh, [Shard(0)]).requires_grad_()
        with CommDebugMode() as counted:
            loss = x.square().sum()
        assert counted.get_total_counts() == 1
        with CommDebugMode() as counted:
            if mesh.get_local_rank() == 0:
                assert f"{loss:.3f}" == f"{loss.item():.3f}"
                assert float(loss.detach()) > 3
                assert str(loss)
            loss.backward()
        assert counted.get_total_counts() == 0
        assert x.grad is not None
        assert_close(x.grad.full_tensor(), 2 * x.detach().full_tensor())


def test_a_loss_is_reduced_once(pool: Pool) -> None:
    pool.run(use_loss, mesh=(2,))
