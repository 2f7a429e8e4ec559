"""Indexing and joining along sharded dimensions, against one process."""

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


def index_select(x: torch.Tensor, dim: int, indices: list[int]) -> torch.Tensor:
    return x.index_select(dim, torch.tensor(indices))


def index(x: torch.Tensor, dim: int, indices: list[int]) -> torch.Tensor:
    return x[(slice(None),) * dim + (torch.tensor([-1, *indices]),)]


def test_indices_are_taken_by_their_owners(pool: Pool) -> None:
    picks = [(3, [0, 6, 3, 3]), (2, [4, 1]), (0, [1])]

    def cases(*places: tuple[Any, ...]) -> list[Sharded]:
        return [Sharded(fn, ((SHAPE, at),), pick) for fn in (index_select, index) for at in places for pick in picks]

    pool.run_cases(check_elements, cases((3,), (2,), ("P",)), mesh=(2,))
    pool.run_cases(check_elements, cases((2, 3), (3, 3)), mesh=(2, 2))


def numbers_among_lists(mesh: DeviceMesh, at: Any) -> None:
    """torch takes a 0-d tensor for a list of one, beside lists."""
    one, several = torch.tensor(5.0, dtype=torch.float64), torch.arange(4, dtype=torch.float64)
    first, third, zeros = torch.tensor(0), torch.tensor(2), torch.zeros(3, dtype=torch.int64)
    given = [one, several, first, third, zeros]
    placed = [place(tensor, mesh, (at if tensor.dim() else "R",)) for tensor in given]
    functions = [
        lambda one, several, first, third, zeros: several.gather(0, third),
        lambda one, several, first, third, zeros: one.gather(0, zeros),
        lambda one, several, first, third, zeros: one.index_select(0, zeros[:1]),
        lambda one, several, first, third, zeros: one.index_select(-1, first),
        lambda one, several, first, third, zeros: several.index_select(0, third),
        lambda one, several, first, third, zeros: several.scatter(0, third, one),
        lambda one, several, first, third, zeros: several.clone().scatter_(0, third, 7.0),
        lambda one, several, first, third, zeros: several.clone().scatter_add_(0, third, several[2:]),
        lambda one, several, first, third, zeros: one.clone().scatter_add_(0, zeros, several),
        lambda one, several, first, third, zeros: one.scatter_reduce(0, first, several, "amax"),
        lambda one, several, first, third, zeros: several.take(third),
        lambda one, several, first, third, zeros: one.take(zeros),
        lambda one, several, first, third, zeros: one.take(first),
    ]
    with convmesh.enable():
        for function in functions:
            assert_close(function(*placed).full_tensor(), function(*given))


def test_numbers_among_lists(pool: Pool) -> None:
    for at in ("R", 0):
        pool.run(numbers_among_lists, at, mesh=(3,))


def added_to_a_pending_sum(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    whole, values = torch.arange(20.0).view(4, 5), torch.arange(15.0).cos().view(3, 5)
    for rows, adds in (([0, 2, 0], True), ([3, 1, 0], False)):
        with convmesh.enable():
            target = place(whole, mesh, ("P",) * mesh.ndim)
            target.index_put_((torch.tensor(rows),), place(values, mesh, at), accumulate=adds)
        expected = whole.clone().index_put_((torch.tensor(rows),), values, accumulate=adds)
        assert_close(target.full_tensor(), expected)


def test_sharded_values_go_into_a_pending_sum(pool: Pool) -> None:
    for at in ((0,), (1,), ("R",)):
        pool.run(added_to_a_pending_sum, at, mesh=(3,))
    pool.run(added_to_a_pending_sum, (1, 0), mesh=(2, 2))


def too_large(mesh: DeviceMesh) -> None:
    """Raises what one process raises, and at once, before a plan lists what is in no memory."""
    x, most = torch.randn(2, 3, 8, 8), 2**40
    for function in (
        lambda x: F.interpolate(x, size=(most, 8)),
        lambda x: F.interpolate(x, scale_factor=float(most), mode="bicubic"),
        lambda x: F.interpolate(x, size=(8, most), mode="bilinear", antialias=True),
        lambda x: F.interpolate(x, size=(most, 8), mode="area"),
        lambda x: F.adaptive_max_pool2d(x, (most, 8)),
        lambda x: F.one_hot((x > 0).long(), most),
        lambda x: x.repeat(1, 1, most, 1),
        lambda x: x.repeat_interleave(most, 2),
        lambda x: F.pad(x, (0, 0, most, 0), value=1.0),
        lambda x: torch.fft.fft(x, n=most, dim=2),
        lambda x: F.unfold(x, 3, padding=2**20),
    ):
        for given in (x, place(x, mesh, (2,))):
            with convmesh.enable(), pytest.raises(RuntimeError, match=r"memory|overflow"):
                function(given)


def test_results_that_no_memory_holds(pool: Pool) -> None:
    pool.run(too_large, mesh=(2,))


def at_places(x: torch.Tensor, *dims: int) -> torch.Tensor:
    """Several dimensions indexed together; the indices are broadcast against each other."""
    places = {1: [[2], [0]], 2: [1, -1, 4], 3: [[6, 0, 3]], 0: [1, 1, 0]}
    return x[tuple(torch.tensor(places[dim]) if dim in dims else slice(None) for dim in range(4))] ** 2


def test_several_dimensions_indexed_together(pool: Pool) -> None:
    picks = [(2, 3), (1, 3), (0, 2), (0, 1, 2, 3), (3,)]

    def cases(*places: tuple[Any, ...]) -> list[Sharded]:
        return [Sharded(at_places, ((SHAPE, at),), dims) for at in places for dims in picks]

    pool.run_cases(check_elements, cases((3,), (2,), (0,), ("P",)), mesh=(2,))
    pool.run_cases(check_elements, cases((2, 3), (3, 3), ("P", 2)), mesh=(2, 2))


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


def same(mesh: DeviceMesh) -> None:
    x = torch.arange(10.0)
    with convmesh.enable():
        whole, part = place(x, mesh, ("R",)), place(x, mesh, (0,))
        assert torch.equal(part, whole)
        assert torch.equal(whole, part)
        assert not torch.equal(part, place(x + (x == 9), mesh, (0,)))
        assert not torch.equal(part, place(x[:9], mesh, (0,)))


def test_equal_on_part_of_the_ranks(pool: Pool) -> None:
    pool.run(same, mesh=(2,))


def unfold(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
    return F.unfold(x, *numbers)


def fold(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
    return F.fold(x, *numbers)


def columns(at: tuple[Any, ...], back: tuple[Any, ...]) -> list[Sharded]:
    """(kernel, dilation, padding, stride) of windows on 7 x 6, and back."""
    numbers = [((3, 2), 1, 1, 1), (2, 1, 0, 2), ((2, 3), (2, 1), (0, 2), (3, 1)), (1, 1, 0, 3)]
    made = []
    for kernel, dilation, padding, stride in numbers:
        whole = F.unfold(torch.zeros(2, 4, 7, 6), kernel, dilation, padding, stride)
        made.append(Sharded(unfold, (((2, 4, 7, 6), at),), (kernel, dilation, padding, stride)))
        made.append(Sharded(fold, ((tuple(whole.shape), back),), ((7, 6), kernel, dilation, padding, stride)))
    return [*made, Sharded(unfold, (((4, 7, 6), tuple(p - 1 if isinstance(p, int) and p else p for p in at)),), (2,))]


def test_windows_as_columns(pool: Pool) -> None:
    pool.run_cases(check_elements, columns((2,), (2,)) + columns((3,), (1,)) + columns((1,), (0,)), mesh=(2,))
    pool.run_cases(check_elements, columns((2,), (2,)), mesh=(4,))
    pool.run_cases(
        check_elements, columns((0, 2), (0, 2)) + columns((2, 2), (2, 2)) + columns(("P", 2), (2, "P")), mesh=(2, 2)
    )


LAYOUTS: list[tuple[tuple[int, ...], list[Any], list[Any]]] = [
    ((2,), [(3,), (2,), (0,), ("P",)], [((3,), (3,)), ((3,), ("R",)), ((2,), (0,)), (("P",), (3,)), (("P",), ("P",))]),
    ((4,), [(3,), (2,)], [((3,), (3,)), ((3,), (2,))]),
    ((2, 2), [(2, 3), (0, 3), (3, 3), ("P", 3)], [((2, 3), (2, 3)), ((0, 3), (3, "R")), ((3, 3), (3, 3))]),
]


@pytest.mark.parametrize(("mesh", "ones"), [(mesh, ones) for mesh, ones, _ in LAYOUTS])
def test_parts_of_one_tensor(pool: Pool, mesh: tuple[int, ...], ones: list[Any]) -> None:
    pool.run_cases(check_elements, [case for at in ones for case in of_one(at)], mesh=mesh)


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
