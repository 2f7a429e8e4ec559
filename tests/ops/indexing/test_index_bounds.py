"""Bad values in an index raise on every rank, whichever rank has them, and what comes after works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

ROWS, COLUMNS = 5, 6
Function = Callable[..., torch.Tensor]


def unpool(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.max_unpool2d.default(x[None, :4, None, :4], index[None, :4, None, :4], [1, ROWS])


# Of a tensor (5, 6), and an index of that shape with values below 5.
FUNCTIONS: dict[str, Function] = {
    "embedding": lambda x, index: F.embedding(index, x),
    "gather": lambda x, index: x.gather(0, index),
    "scatter": lambda x, index: x.scatter(0, index, x * 2),
    "scatter of a number": lambda x, index: x.scatter(0, index, 7.0),
    "scatter_add": lambda x, index: x.scatter_add(0, index, x),
    "scatter_reduce": lambda x, index: x.scatter_reduce(0, index, x, "amax"),
    "index_select": lambda x, index: x.index_select(0, index[:, 5]),
    "index_add": lambda x, index: x.index_add(0, index[:, 5], x),
    "index_fill": lambda x, index: x.index_fill(0, index[:, 5], 1.0),
    "index": lambda x, index: x[index[:, 5]],
    "index counted from the end": lambda x, index: x[-1 - index[:, 5] // 11],
    "index_put counted from the end": lambda x, index: x.index_put((-1 - index[:, 5] // 11,), x),
    "index along two": lambda x, index: x[index[:, 5], index[:, 4]],
    "index_put": lambda x, index: x.index_put((index[:, 5],), x),
    "index_put that adds": lambda x, index: x.index_put((index[:, 5],), x, accumulate=True),
    "take": lambda x, index: x.take(index * 6 + 5),
    "put": lambda x, index: x.put(index[:, 5] * 6 + 5, x[:, 0]),
    "nll_loss": lambda x, index: F.nll_loss(x, index[:, 5]),
    "nll_loss, unreduced": lambda x, index: F.nll_loss(x, index[:, 5], reduction="none"),
    "cross_entropy": lambda x, index: F.cross_entropy(x, index[:, 5]),
    "one_hot": lambda x, index: F.one_hot(index, ROWS) * 1.0,
    "max_unpool": unpool,
}  # fmt: skip


def check_bad(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], tuple[Any, ...]]) -> list[str]:
    """With a bad value in the last of the index, or in the first, and then without."""
    name, x_at, index_at = case
    function = FUNCTIONS[name]
    x = torch.arange(ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS)
    good = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) * 7 % ROWS
    told = []
    with convmesh.enable():
        for where in ((ROWS - 1, COLUMNS - 1), (3, 3)):
            bad = good.clone()
            bad[where] = 99
            try:
                function(x, bad)
            except (IndexError, RuntimeError):
                with pytest.raises((IndexError, RuntimeError)) as error:
                    function(place(x, mesh, x_at), place(bad, mesh, index_at))
                told.append(type(error.value).__name__)
        assert told, "one device minds"
        actual = function(place(x, mesh, x_at), place(good, mesh, index_at))
        assert_close(actual.full_tensor(), function(x, good))
    return told


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_bad_values_raise_on_every_rank(pool: Pool, mesh: tuple[int, ...]) -> None:
    places = [("R", 0), (0, 0), (1, 0), (0, "R")]
    if len(mesh) == 1:
        pairs = [((x,), (index,)) for x, index in places]
    else:
        pairs = [((0, "R"), (0, 1)), ((0, 1), (1, 0)), ((1, 0), ("R", 1))]
    cases = [(name, x, index) for name in FUNCTIONS for x, index in pairs]
    for case, (first, *others) in zip(cases, pool.run_cases(check_bad, cases, mesh=mesh), strict=True):
        assert all(told == first for told in others), case
