"""No rank makes a tensor as large as one process does, nor is sent one: seen by size, on tensors large enough to tell.

What is gathered by decision is in the operators' table, and only that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

import convmesh
from convmesh.sharding.constants import constants_allowed
from convmesh.sharding.registry import declared
from tests.cases import place
from tests.gathers import Sizes
from tests.harness import Pool
from tests.ops.families import FUNCTIONS
from tests.ops.snippets import SNIPPETS

Function = Callable[..., Any]
# A rank's largest tensor, as a part of the largest of one process: half with two ranks, and halos. Less is a gather.
LARGEST = {2: 0.75, 4: 0.5}


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dilated(dilation: int, groups: int = 1) -> Function:
    return lambda x, w: F.conv2d(x, w, padding=dilation, dilation=dilation, groups=groups)


def one_hot(x: torch.Tensor) -> torch.Tensor:
    return F.one_hot(x.detach().argmax(1), x.shape[1]).permute(0, 3, 1, 2) * x


def scattered(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(1, x.detach().argmax(1, keepdim=True), 1.0) * x


# Functions whose gradient, on one device, is made of a few numbers, or of zeros with a few numbers in them.
FEW_NUMBERS: dict[str, Function] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "mean of space": lambda x: x.mean((2, 3)),
    "sum of rows": lambda x: x.sum(2),
    "kept mean": lambda x: x.mean((1, 2, 3), keepdim=True),
    "one row": lambda x: x[:, :, 0].sum(),
    "one channel": lambda x: x[:, 0].sum(),
    "some rows": lambda x: x[:, :, 3:5].sum(),
    "every other row": lambda x: x[:, :, ::2].mean(),
    "rows by number": lambda x: x[:, :, [1, 3]].sum(),
    "channels by number": lambda x: x[:, [1, 3]].sum(),
    "index_select": lambda x: x.index_select(2, torch.tensor([1, 3])).sum(),
    "unbind": lambda x: x.unbind(2)[3].sum(),
    "split": lambda x: x.split(4, 2)[3].sum(),
    "chunk": lambda x: x.chunk(4, 2)[3].mean(),
    "diagonal": lambda x: x[0].diagonal(0, 1, 2).sum(),
    "median of rows": lambda x: x.median(2).values.sum(),
    "median of channels": lambda x: x.median(1).values.sum(),
    "median": lambda x: x.median(),
    "kthvalue": lambda x: x.kthvalue(2, 2).values.sum(),
    "mode": lambda x: x.mode(1).values.sum(),
    "max of rows": lambda x: x.max(2).values.sum(),
    "max of channels": lambda x: x.max(1).values.sum(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax((2, 3)).sum(),
    "sort": lambda x: x.sort(1).values[:, 0].sum(),
    "topk": lambda x: x.topk(2, 2).values.sum(),
    "gather": lambda x: x.gather(2, x.detach().argmax(2, True)).sum(),
    "masked": lambda x: x[x.detach() > 2].sum(),
    "norm": lambda x: x.norm(),
    "std": lambda x: x.std((2, 3)).sum(),
    "logsumexp": lambda x: x.logsumexp((1, 2, 3)).sum(),
    "cumsum": lambda x: x.cumsum(2)[:, :, -1].sum(),
    "one_hot": one_hot,
    "scatter_": scattered,
}


@dataclass(frozen=True)
class Case:
    """A function of a tensor that is sharded, and of others that are replicated."""

    name: str
    function: Function
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()


def cases() -> list[Case]:
    """Each of another shape: where a gradient goes may depend on tensors of the same shape that were seen before."""
    few = [Case(name, function, (2, 4, 64, 17 + n)) for n, (name, function) in enumerate(FEW_NUMBERS.items())]
    families = [
        Case(name, function, (2, 4, 64 + 2 * n, 64), others) for n, (name, (function, others)) in enumerate(FUNCTIONS.items())
    ]
    convolutions = [
        Case(f"dilation {dilation}, {groups} groups", dilated(dilation, groups), (2, 16, size, size), ((16, 16 // groups, 3, 3),))
        for dilation, size, groups in ((12, 64, 1), (24, 64, 16), (36, 48, 1), (40, 40, 1), (9, 48, 4))
    ]  # fmt: skip
    return [*few, *families, *convolutions]


CASES = {case.name: case for case in cases()}


def sizes(function: Function, tensors: Sequence[torch.Tensor]) -> Sizes:
    """Of the function and of its gradients."""
    with constants_allowed(), Sizes() as seen:
        outputs = tree_flatten(function(*tensors))[0]
    heads = [output for output in outputs if output.requires_grad]
    gradients = [torch.ones_like(head) for head in heads]
    with seen:
        torch.autograd.backward(heads, gradients)
    return seen


def measure(mesh: DeviceMesh, name: str, at: tuple[Any, ...]) -> tuple[float, float, str]:
    """The largest tensor made here, and what arrived at once, as parts of the largest of one process; and who made it."""
    case = CASES[name]
    whole = [numbered(shape) for shape in (case.shape, *case.others)]
    one = sizes(case.function, [tensor.clone().requires_grad_() for tensor in whole])
    with convmesh.enable():
        placed = [place(t, mesh, at if n == 0 else ("R",) * mesh.ndim).requires_grad_() for n, t in enumerate(whole)]
        many = sizes(case.function, placed)
    largest = max(one.largest, whole[0].nbytes)
    return many.largest / largest, many.received_at_once / largest, many.maker


def measure_all(mesh: DeviceMesh, names: Sequence[str], at: tuple[Any, ...]) -> list[tuple[float, float, str]]:
    return [measure(mesh, name, at) for name in names]


@pytest.mark.parametrize(("mesh", "at"), [((2,), (2,)), ((2, 2), (2, 3))])
def test_nothing_is_whole_on_a_rank(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    names = [name for name in CASES]
    by_rank = pool.run(measure_all, names, at, mesh=mesh)
    for name, told in zip(names, zip(*by_rank, strict=True), strict=True):
        largest, arrived, maker = max(told)
        print(f"{name}: {largest:.2f} {arrived:.2f} {maker}")
    assert 0
