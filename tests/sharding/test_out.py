"""Results that are written where the caller says: `torch.add(a, b, out=c)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool

Write = Callable[[torch.Tensor, torch.Tensor], Any]

# Of a 5 x 4 tensor and one for the results.
WRITES: dict[str, Write] = {
    "add": lambda x, o: torch.add(x, 1, out=o),
    "add of what moves": lambda x, o: torch.add(x, x.flip(0), out=o),
    "into itself": lambda x, o: torch.sub(o, x, out=o),
    "into a part": lambda x, o: torch.exp(x[1:], out=o[:-1]),
    "into a turned part": lambda x, o: torch.mul(x.mT, 2, out=o.mT),
    "into every other": lambda x, o: torch.neg(x[:, ::2], out=o[:, ::2]),
    "into a diagonal": lambda x, o: torch.add(x.diagonal(), 1, out=o.diagonal()),
    "comparison": lambda x, o: torch.gt(x, 0, out=o),
    "sum": lambda x, o: torch.sum(x, 0, out=o[0]),
    "sum in the result's dtype": lambda x, o: torch.sum(x.float() + 1e8, 0, out=o[0]),
    "running sum": lambda x, o: torch.cumsum(x, 0, out=o),
    "softmax": lambda x, o: torch.softmax(x, 1, out=o),
    "largest and where": lambda x, o: torch.max(x, 1, out=(o[:, 0], torch.zeros_like(o[:, 0], dtype=torch.int64))),
    "sort": lambda x, o: torch.sort(x, 0, out=(o, torch.zeros_like(o, dtype=torch.int64))),
    "matrix product": lambda x, o: torch.matmul(x, x.mT @ x, out=o),
    "cat": lambda x, o: torch.cat([x[3:], x[:3]], out=o),
    "index_select": lambda x, o: torch.index_select(x, 0, torch.tensor([0, 2]), out=o[:2]),
    "lower triangle": lambda x, o: torch.tril(x, out=o),
    "random numbers": lambda x, o: torch.normal(x, 1.0, out=o),
    "another dtype": lambda x, o: torch.add(x.float(), 1, out=o),
}
PLACES: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (2,): [(0,), (1,), ("R",), ("P",)],
    (2, 2): [(0, 1), (1, 0), (0, 0), ("P", 1), (0, "R")],
}


def written(x: torch.Tensor, name: str, out: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    out = out * 1
    WRITES[name](x, out)
    return out


def check(mesh: DeviceMesh, case: tuple[tuple[Any, ...], tuple[Any, ...]]) -> None:
    x, out = torch.randn(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    with convmesh.enable():
        for name in WRITES:
            result = written(place(x, mesh, case[0]), name, place(out, mesh, case[1]))
            assert_close(result.full_tensor(), written(x, name, out))


@pytest.mark.parametrize("mesh", PLACES)
def test_out_has_what_one_device_writes(pool: Pool, mesh: tuple[int, ...]) -> None:
    places = PLACES[mesh]
    pool.run_cases(check, [(at, to) for n, at in enumerate(places) for to in (at, places[n - 1])], mesh=mesh)


def compiled(mesh: DeviceMesh) -> None:
    x, out = torch.randn(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    with convmesh.enable():
        for name in ("add", "sum", "cat", "matrix product", "into itself"):
            torch._dynamo.reset()
            run = torch.compile(lambda x, o, name=name: written(x, name, o), backend="aot_eager")
            assert_close(run(place(x, mesh, (0,)), place(out, mesh, (1,))).full_tensor(), written(x, name, out))


def test_compiled(pool: Pool) -> None:
    pool.run(compiled, mesh=(2,))


def refused(mesh: DeviceMesh) -> list[str]:
    x, said = torch.randn(5, 4), []
    with convmesh.enable():
        sharded = place(x, mesh, (0,))
        for call in (
            lambda: torch.add(sharded, 1, out=torch.zeros(5, 4)),
            lambda: torch.add(sharded, 1, out=sharded.new_zeros(4, 4)),
            lambda: torch.add(sharded, 0.5, out=torch.zeros_like(sharded, dtype=torch.int64)),
            lambda: torch.rand(5, 4, out=sharded),
        ):
            with pytest.raises(convmesh.ShardingError) as error:
                call()
            said.append(str(error.value))
    return said


def test_what_cannot_be_written_is_refused(pool: Pool) -> None:
    plain, shape, dtype, made = same_on_all_ranks(pool.run(refused, mesh=(2,)))
    assert "plain torch.Tensor beside DTensors: out" in plain
    assert "the result's shape (5, 4) is not that of out" in shape
    assert "can't be cast" in dtype
    assert "call it without out=" in made
