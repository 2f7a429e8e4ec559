"""Parts of sharded dimensions, joins and copies along them, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.against_dense import Sharded, check_elements

SHAPE = (2, 3, 5, 7)


def take(x: torch.Tensor, dim: int, start: int | None, stop: int | None, step: int) -> torch.Tensor:
    return torch.ops.aten.slice.Tensor(x, dim, start, stop, step)


def select(x: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    return x.select(dim, index) ** 2


def split(x: torch.Tensor, size: Any, dim: int) -> Any:
    return x.split(size, dim)


def second_of_split(x: torch.Tensor, size: Any, dim: int) -> Any:
    return x.split(size, dim)[1]


def chunk(x: torch.Tensor, parts: int, dim: int) -> Any:
    return x.chunk(parts, dim)


def unbind(x: torch.Tensor, dim: int) -> Any:
    return [part * part for part in x.unbind(dim)[1:]]


def flip(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.flip(dims)


def roll(x: torch.Tensor, shifts: tuple[int, ...], dims: tuple[int, ...]) -> torch.Tensor:
    return x.roll(shifts, dims)


def cat(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, y, x], dim)


def stack(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.stack([x, y * y], dim)


def slice_scatter(x: torch.Tensor, y: torch.Tensor, dim: int, start: int, stop: int, step: int) -> torch.Tensor:
    return x.slice_scatter(y, dim, start, stop, step)


def select_scatter(x: torch.Tensor, y: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    return x.select_scatter(y, dim, index)


def of_one(at: tuple[Any, ...]) -> list[Sharded]:
    x = ((SHAPE, at),)
    slices = [(3, 1, 4, 1), (3, 1, None, 2), (2, -2, None, 1), (3, 2, 2, 1), (2, 0, 9, 3), (3, 0, 7, 1), (1, 1, 2, 1)]
    made = [Sharded(take, x, numbers) for numbers in slices]
    made += [Sharded(select, x, numbers) for numbers in ((3, 0), (3, -1), (2, 2), (1, 1), (0, 1))]
    made += [Sharded(split, x, numbers) for numbers in ((3, 3), ([1, 0, 4], 2))]
    made += [Sharded(second_of_split, x, (2, 3)), Sharded(chunk, x, (2, 2))]
    # Over two mesh dimensions at once DTensor itself exchanges the cuts, which gathers on gloo.
    made += [Sharded(unbind, x, (dim,), gathers=at.count(dim) > 1) for dim in (2, 3)]
    made += [Sharded(flip, x, ((3,),)), Sharded(flip, x, ((1, -2, 3),))]
    made += [Sharded(roll, x, numbers) for numbers in (((2,), (3,)), ((-1, 11), (2, 3)), ((1, 1), (3, 3)))]
    return made


def of_two(at: tuple[Any, ...], other: tuple[Any, ...]) -> list[Sharded]:
    # Pending sums are reduced beside other placements, which is an all-reduce, and never a gather.
    gathers = at != other
    x = (SHAPE, at)
    made = [Sharded(cat, (x, (shape, other)), (dim,), gathers) for shape, dim in (((2, 3, 5, 4), 3), ((2, 1, 5, 7), 1))]
    made += [Sharded(stack, (x, (SHAPE, other)), (dim,), gathers) for dim in (0, 3, -1)]
    part = ((2, 3, 5, 3), other)
    made += [Sharded(slice_scatter, (x, part), (3, 1, stop, step), gathers) for stop, step in ((4, 1), (7, 2))]
    return made


def put_index(at: tuple[Any, ...], other: tuple[Any, ...]) -> list[Sharded]:
    return [Sharded(select_scatter, ((SHAPE, at), ((2, 3, 5), other)), (3, index), True) for index in (0, -1)]


def windows(x: torch.Tensor, dim: int, size: int, step: int) -> torch.Tensor:
    return x.unfold(dim, size, step)


def repeated(x: torch.Tensor, *counts: int) -> torch.Tensor:
    return x.repeat(counts)


def test_repeats_and_windows(pool: Pool) -> None:
    def cases(*places: tuple[Any, ...]) -> list[Sharded]:
        sizes, counts = ((3, 3, 2), (2, 2, 1), (1, 3, 1)), ((1, 1, 2, 1), (2, 1, 1, 3, 2))
        made = [Sharded(windows, ((SHAPE, at),), numbers) for at in places for numbers in sizes]
        return made + [Sharded(repeated, ((SHAPE, at),), numbers) for at in places for numbers in counts]

    pool.run_cases(check_elements, cases((3,), (2,), (0,)), mesh=(2,))
    pool.run_cases(check_elements, cases((2, 3), (0, 2)), mesh=(2, 2))


LAYOUTS: list[tuple[tuple[int, ...], list[Any], list[Any]]] = [
    ((2,), [(3,), (2,), (0,), ("P",)], [((3,), (3,)), ((3,), ("R",)), ((2,), (0,)), (("P",), (3,)), (("P",), ("P",))]),
    ((4,), [(3,), (2,)], [((3,), (3,)), ((3,), (2,))]),
    ((2, 2), [(2, 3), (0, 3), (3, 3), ("P", 3)], [((2, 3), (2, 3)), ((0, 3), (3, "R")), ((3, 3), (3, 3))]),
]


@pytest.mark.parametrize(("mesh", "ones"), [(mesh, ones) for mesh, ones, _ in LAYOUTS])
def test_parts_of_one_tensor(pool: Pool, mesh: tuple[int, ...], ones: list[Any]) -> None:
    pool.run_cases(check_elements, [case for at in ones for case in of_one(at)], mesh=mesh, share=1 / 2)


@pytest.mark.parametrize(("mesh", "pairs"), [(mesh, pairs) for mesh, _, pairs in LAYOUTS])
def test_joining_tensors(pool: Pool, mesh: tuple[int, ...], pairs: list[Any]) -> None:
    pool.run_cases(check_elements, [case for pair in pairs for case in of_two(*pair)], mesh=mesh)


def test_putting_one_index_back(pool: Pool) -> None:
    pool.run_cases(check_elements, put_index((3,), (2,)) + put_index((3,), ("R",)) + put_index((1,), (1,)), mesh=(2,))
    pool.run_cases(check_elements, put_index((3, 2), (0, 2)), mesh=(2, 2))


def infer(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """In inference mode operators come whole, and views of other tensors are views."""

    def steps(x: torch.Tensor) -> list[torch.Tensor]:
        made = [x[..., 1:4], x[..., 2], *x.split(3, 3), *x.unbind(3), x.flatten(1), x.view(6, 35), x.flip(3)]
        made += [F.pad(x, (1, 2, 3, 0), mode) for mode in ("constant", "reflect", "replicate", "circular")]
        return [*made, *x.chunk(2, 2), F.linear(x, x[0, 0]), x @ x[0, 0].t(), torch.cat([x, x], 3)]

    dense = torch.arange(210, dtype=torch.float64).view(SHAPE)
    with convmesh.enable(), torch.inference_mode():
        x = place(dense, mesh, at)
        for actual, expected in zip(steps(x), steps(dense), strict=True):
            assert_close(actual.full_tensor(), expected)


def test_inference_mode(pool: Pool) -> None:
    pool.run_cases(infer, [(3,), (2,), (0,)], mesh=(2,))


def compiled(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    def steps(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.pad(x, (1, 2, 1, 1), "reflect")[..., 2:7].flip(3).roll(1, 2)
        y = F.pad(torch.cat([y, y[..., 1:3]], 3), (1, 1, 1, 1), "circular")
        return F.linear(y, w).flatten(1) + y[..., 4].sum()

    dense = torch.arange(210, dtype=torch.float64).view(SHAPE).requires_grad_()
    weight = torch.arange(27, dtype=torch.float64).view(3, 9)
    expected = steps(dense, weight)
    expected.sum().backward()
    with convmesh.enable():
        x = place(dense.detach(), mesh, at).requires_grad_()
        actual = torch.compile(steps, fullgraph=True, backend="aot_eager")(x, place(weight, mesh, ("R",) * len(at)))
        actual.sum().backward()
        assert_close(actual.full_tensor(), expected)
        assert_close(x.grad.full_tensor(), dense.grad)


def test_compiled(pool: Pool) -> None:
    pool.run_cases(compiled, [(3,), (2,)], mesh=(2,))
