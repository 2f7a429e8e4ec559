"""Views under torch.compile: parts of an input that are returned, and writes into parts, as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

Function = Callable[[Any], Any]
SHAPE = (5, 6, 8)

VIEWS: dict[str, Function] = {
    "chunk": lambda x: x.chunk(2, 0),
    "split": lambda x: x.split([2, 4], 1),
    "slice": lambda x: x[..., 1:],
    "both": lambda x: x[1:, :4],
    "select": lambda x: x[:, 1],
    "view": lambda x: x.view(5, 48),
    "transpose": lambda x: x.transpose(0, 1),
    "unbind": lambda x: x.unbind(1),
    "expand": lambda x: x[:, :, None].expand(5, 6, 3, 8),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "chained": lambda x: x.transpose(1, 2)[:, 1:].chunk(2, 2),
    "beside values": lambda x: (x * 2, x[:, 1:]),
    "of a result": lambda x: (x * 2).chunk(3, 1),
}
WRITES: dict[str, Function] = {
    "narrow": lambda y: y.narrow(1, 1, 3).mul_(3),
    "rows": lambda y: y[1:].add_(1),
    "steps": lambda y: y[..., ::2].mul_(2),
    "index": lambda y: y[3].fill_(2),
    "column": lambda y: y[:, 4].zero_(),
    "view": lambda y: y.view(5, 48).mul_(2),
    "transposed": lambda y: y.transpose(0, 1)[1:].mul_(2),
    "diagonal": lambda y: y.diagonal(0, 1, 2).mul_(2),
    "assigned": lambda y: y.__setitem__((slice(None), slice(1, 3)), 5.0),
    "assigned from itself": lambda y: y.__setitem__((..., slice(1, 3)), y[..., 3:5] * 2),
    "chunk": lambda y: y.chunk(2, 0)[1].mul_(2),
    "unbound": lambda y: y.unbind(1)[2].mul_(2),
    "of a part": lambda y: y[1:4][:, 1:].mul_(2),
    "twice": lambda y: (y[1:].mul_(2), y[:3].add_(1), y[2:].mul_(3)),
    "then read": lambda y: y[1:].mul_(y[:4].sum()),
    "nothing": lambda y: (y[:0].mul_(2), y[:, 3:3].add_(1), y[:0].reshape(0, 2).add_(1)),
}
# Views of which several are made at once are not written into where gradients are asked for.
AUTOGRAD_REFUSES = ("chunk", "unbound")


def leaf(tensor: torch.Tensor, mesh: DeviceMesh | None, dim: int) -> Any:
    return (tensor.clone() if mesh is None else place(tensor, mesh, (dim,))).requires_grad_()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def returned(mesh: DeviceMesh | None, name: str, dim: int) -> list[torch.Tensor]:
    """What the function returns, and the gradient of all of it."""
    x = leaf(torch.arange(240.0, dtype=torch.float64).reshape(SHAPE), mesh, dim)
    function = VIEWS[name] if mesh is None else torch.compile(VIEWS[name], fullgraph=True, backend="aot_eager")
    results = function(x)
    results = list(results) if isinstance(results, list | tuple) else [results]
    sum(((number + 2) * result.square()).sum() for number, result in enumerate(results)).backward()
    assert x.grad is not None
    return [whole(value.detach()) for value in (*results, x.grad)]


def written(mesh: DeviceMesh | None, name: str, dim: int) -> list[torch.Tensor]:
    """Into a value that is made before, with gradients, and into the input itself."""

    def into_value(x: Any) -> Any:
        y = x * 1.0
        WRITES[name](y)
        return y * y

    def into_input(x: Any) -> Any:
        WRITES[name](x)
        return x + 1

    numbers = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(SHAPE)
    x, given = leaf(numbers, mesh, dim), leaf(numbers, mesh, dim).detach()
    if mesh is not None:
        into_value, into_input = (
            torch.compile(function, fullgraph=True, backend="aot_eager") for function in (into_value, into_input)
        )
    results = [into_input(given), given]
    if name not in AUTOGRAD_REFUSES:
        result = into_value(x)
        result.sum().backward()
        results += [result.detach(), x.grad]
    return [whole(value) for value in results]


def check(mesh: DeviceMesh, case: tuple[str, str, int]) -> None:
    kind, name, dim = case
    torch._dynamo.reset()
    run = returned if kind == "returned" else written
    with convmesh.enable():
        actual = run(mesh, name, dim)
    for mine, wanted in zip(actual, run(None, name, dim), strict=True):
        assert_close(mine, wanted)


def test_parts_of_the_input_are_returned(pool: Pool) -> None:
    pool.run_cases(check, [("returned", name, number % 2) for number, name in enumerate(VIEWS)], mesh=(2,))


def test_writes_into_parts(pool: Pool) -> None:
    pool.run_cases(check, [("written", name, number % 2) for number, name in enumerate(WRITES)], mesh=(2,))


def write_later(mesh: DeviceMesh, name: str) -> None:
    """Into what compiled code has returned: it reaches the full tensor, as on one device, or is refused."""
    torch._dynamo.reset()
    numbers = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(SHAPE)
    for dim in range(3):
        given, dense = leaf(numbers, mesh, dim).detach(), numbers.clone()
        with convmesh.enable():
            results = torch.compile(VIEWS[name], fullgraph=True, backend="aot_eager")(given)
            found = results if isinstance(results, list | tuple) else [results]
            wanted = VIEWS[name](dense)
            for mine, theirs in zip(found, wanted if isinstance(wanted, list | tuple) else [wanted], strict=True):
                try:
                    mine.mul_(2)
                except convmesh.ShardingError:
                    assert_close(mine.clone().mul_(2).full_tensor(), theirs * 2)
                else:
                    theirs.mul_(2)
                assert_close(mine.full_tensor(), theirs)
            assert_close(given.full_tensor(), dense)


def test_writing_into_what_was_returned(pool: Pool) -> None:
    pool.run_cases(write_later, [name for name in VIEWS if name != "expand"], mesh=(2,))
