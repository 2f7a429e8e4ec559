"""A part of a sharded dimension shows what was written into the full tensor since, whatever reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import convmesh
from convmesh.sharding import view_writeback
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

SHAPE = (2, 3, 5, 7)
Steps = Callable[[torch.Tensor], list[Any]]


def by_a_rule(y: torch.Tensor) -> list[Any]:
    v = y[..., 2:5]
    y.mul_(2)
    return [v.sum(), v + 1, v.relu(), torch.cat([v, v], 3), v.mean(3), v[0, 0, 0, 0]]


def by_an_operator_without_one(y: torch.Tensor) -> list[Any]:
    v = y[..., 2:5]
    y.mul_(2)
    return [torch.special.bessel_j1(v), torch.nextafter(v, v + 1)]


def beside_the_full_tensor(y: torch.Tensor) -> list[Any]:
    v, w = y[..., 1:6], y[:, :, 1:4]
    y.add_(1)
    return [v * y[..., 1:6], w - y[:, :, 1:4], v[:, :, 1:4] * w[..., 1:6]]


def views_of_copies(y: torch.Tensor) -> list[Any]:
    v = y[..., 2:5]
    t, one, flat = v.transpose(0, 1), v[0], v.detach()
    y.sub_(3)
    return [t + 0, one.abs(), flat * 2]


def copies_of_copies(y: torch.Tensor) -> list[Any]:
    u = y[..., 1:6]
    v = u[..., 1:4]
    w = v[..., 1]
    y.mul_(3)
    first = [w * 1, v * 1, u * 1]
    u.add_(1)
    second = [w * 1, v * 1, y * 1]
    w.neg_()
    return [*first, *second, v * 1, u * 1, y * 1]


def through_another_part(y: torch.Tensor) -> list[Any]:
    u, v = y[..., 1:4], y[..., 2:6]
    u.mul_(5)
    first = v.clone()
    v.add_(2)
    return [first, u + 0, y + 0]


def of_reshaped(y: torch.Tensor) -> list[Any]:
    flat, rows = y.view(6, 35), y.flatten(1)
    y[0].fill_(4)
    first = flat * 2
    flat.add_(1)
    return [first, rows * 1, y * 1]


def of_pieces(y: torch.Tensor) -> list[Any]:
    first, second = y.split([3, 4], 3)
    indices, diagonal = y.unbind(3), y.diagonal(0, 2, 3)
    y.add_(1)
    return [first * 1, second * 1, indices[2] * 1, diagonal * 1, torch.stack(indices[1:3])]


def of_lists(y: torch.Tensor) -> list[Any]:
    parts = [y[..., 1:2], y[..., 5:]]
    y.add_(1)
    return list(torch._foreach_mul(parts, 2.0))


def written_by_a_list(y: torch.Tensor) -> list[Any]:
    v = y[..., 2:5]
    torch._foreach_add_([y], 4.0)
    first = v * 1
    torch.add(y, y, out=y)
    return [first, v * 1]


def as_numbers(y: torch.Tensor) -> list[Any]:
    v = y[..., 2]
    one = v[0, 0, 0]
    y.add_(0.5)
    return [torch.tensor(number, dtype=y.dtype) for number in (one.item(), bool(one > 2), one.tolist())]


READS: list[Steps] = [
    by_a_rule, by_an_operator_without_one, beside_the_full_tensor, views_of_copies, copies_of_copies,
    through_another_part, of_reshaped, of_pieces, of_lists, written_by_a_list, as_numbers,
]  # fmt: skip
PLACES: list[tuple[tuple[int, ...], list[tuple[Any, ...]]]] = [
    ((2,), [(3,), (2,), (0,)]),
    ((4,), [(3,)]),
    ((2, 2), [(2, 3), (3, 3), ("R", 3), ("P", 3)]),
]


def read(mesh: DeviceMesh, case: tuple[Steps, tuple[Any, ...]]) -> None:
    steps, at = case
    x = torch.linspace(-1, 3, 210, dtype=torch.float64).view(SHAPE)
    expected = steps(x.clone())
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with convmesh.enable(), mode():
            actual = steps(place(x, mesh, at) * 1.0)
            for mine, wanted in zip(actual, expected, strict=True):
                assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, wanted)


@pytest.mark.parametrize(("mesh", "places"), PLACES)
def test_operators_read_what_was_written(pool: Pool, mesh: tuple[int, ...], places: list[Any]) -> None:
    # tolist() wants what every rank has all of.
    cases = [(steps, at) for steps in READS for at in places if steps is not as_numbers or "P" not in at]
    pool.run_cases(read, cases, mesh=mesh)


def read_otherwise(mesh: DeviceMesh, name: str) -> None:
    """What is no operator."""
    x = torch.arange(14, dtype=torch.float64).view(2, 7)
    with convmesh.enable():
        y = place(x, mesh, (1,)) * 1.0
        v = y[:, 2:6]
        y.mul_(3)
        mine = y.clone()[:, 2:6]  # with the layout of v
        if name == "to_local":
            assert_close(v.to_local(), mine.to_local())
        elif name == "full_tensor":
            assert_close(v.full_tensor(), (3 * x)[:, 2:6])
        elif name == "redistribute":
            assert_close(v.redistribute(placements=[Replicate()]).to_local(), (3 * x)[:, 2:6])
        elif name == "print":
            assert repr(v) == repr(mine)
        elif name == "data":
            assert_close(v.data.to_local(), mine.to_local())
        elif name == "written again":
            v.full_tensor()
            y.add_(1)
            assert_close(v.full_tensor(), (3 * x + 1)[:, 2:6])
        elif name == "compiled":
            torch._dynamo.reset()
            double = torch.compile(lambda t: t * 2, backend="aot_eager", fullgraph=True)
            assert_close(double(v).full_tensor(), (6 * x)[:, 2:6])
            y.add_(1)
            assert_close(double(v).full_tensor(), (6 * x + 2)[:, 2:6])
    assert not view_writeback.watching_reads


OTHERS = ["to_local", "full_tensor", "redistribute", "print", "data", "written again", "compiled"]


def test_whatever_reads(pool: Pool) -> None:
    pool.run_cases(read_otherwise, OTHERS, mesh=(2,))


def unwatched(mesh: DeviceMesh) -> None:
    """Reads cost nothing as long as no tensor was written of which copies had been taken."""
    with convmesh.enable():
        x = place(torch.arange(12, dtype=torch.float64), mesh, (0,))
        part = x[3:9]
        part.mul_(2)
        (x + 1).mul_(2)
        assert not view_writeback.watching_reads
        x.add_(1)
        assert view_writeback.watching_reads


def test_reads_are_watched_after_a_write_only(pool: Pool) -> None:
    pool.run(unwatched, mesh=(2,))


def on_ranks_without_elements(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """Views of local tensors without elements, whose strides say nothing, are views as on the other ranks."""
    x = torch.arange(4, dtype=torch.float64).view(1, 4, 1, 1)
    with convmesh.enable():
        for y in (ours := place(x, mesh, at) * 1.0, dense := x * 1.0):
            flat, row, kept = y.squeeze(), y.reshape(-1), y.select(3, 0).select(2, 0)
            y.add_(1)
            row.mul_(2)
            y.copy_(torch.cat([y.flatten() + flat, kept.flatten() - row])[:4].view(1, 4, 1, 1))
        assert_close(ours.full_tensor(), dense)


def test_ranks_without_elements(pool: Pool) -> None:
    pool.run_cases(on_ranks_without_elements, [(2,), (3,), (0,)], mesh=(4,))
    pool.run_cases(on_ranks_without_elements, [(1, 2), (2, 2)], mesh=(2, 2))
