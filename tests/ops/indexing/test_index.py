"""Indexing along sharded dimensions, against one process."""

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
