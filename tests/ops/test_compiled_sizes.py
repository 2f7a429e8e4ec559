"""Sizes that change under torch.compile: the shapes and values of one process, and few compilations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import convmesh
from tests.cases import place, places_of
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.families import FUNCTIONS

# The last one is cut unevenly, and leaves the first rank as much as 8 does.
SIZES = (8, 12, 16, 24, 7)
FEW = (8, 12, 7)
SHAPE = (3, 4, 11, 6)
WEIGHT = torch.linspace(-1, 1, 4 * 4 * 3 * 3, dtype=torch.float64).reshape(4, 4, 3, 3)
MATRIX = torch.linspace(-1, 1, 5 * 264, dtype=torch.float64).reshape(5, 264)

twice_as_large = partial(F.interpolate, scale_factor=2.0, mode="bilinear")

Function = Callable[..., torch.Tensor]
HERE: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "elementwise": (lambda x: torch.where(x > 0, x.sigmoid(), x * 2) + 1, ()),
    "convolution": (lambda x, w: F.conv2d(x, w, padding=1, stride=2), (WEIGHT,)),
    "network": (lambda x, w: twice_as_large(F.conv2d(F.conv2d(x, w, stride=2, padding=1), w, padding=1)), (WEIGHT,)),
    "linear": (lambda x, w: F.linear(x.flatten(1), w), (MATRIX,)),
    "matmul": (lambda x: x @ x.transpose(2, 3), ()),
    "view": (lambda x: x.reshape(x.shape[0], 2, -1).transpose(0, 1), ()),
    "softmax": (lambda x: x.softmax(1), ()),
    "sum": (lambda x: x.square().sum(), ()),
    "sort": (lambda x: x.sort(1)[0], ()),
    "cat along the batch": (lambda x: torch.cat([x, x * 2]), ()),
    "stack": (lambda x: torch.stack([x, x * 2], 1), ()),
    "rows": (lambda x: x[1:] * 2, ()),
    "merged": (lambda x: x.flatten(0, 1).flip(0), ()),
}
# Of parts of the batch, and with others in another order.
BATCH: dict[str, Function] = {
    "flip": lambda x: x.flip(0) * 2,
    "roll": lambda x: x.roll(1, 0) * 2,
    "rot90": lambda x: torch.rot90(x, 1, (0, 2)),
    "pad": lambda x: F.pad(x, (0,) * 6 + (1, 2)),
    "every other": lambda x: x[::2] * 2,
    "differences": lambda x: x[1:] - x[:-1],
    "half": lambda x: x[: x.shape[0] // 2] * 2,
    "last": lambda x: x[-1] * 2,
    "chunk": lambda x: x.chunk(2, 0)[1] * 2,
    "windows": lambda x: x.unfold(0, 3, 2) * 2,
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "with its mirror": lambda x: torch.cat([x, x.flip(0)]),
}
# Of the families, those with a batch of any size: the others have one of 2 in their arguments.
ALL = [*HERE, *(name for name in FUNCTIONS if name != "grid_sample")]
SAMPLE = (
    "elementwise", "convolution", "linear", "max_pool", "cat along the batch", "rows", "bilinear", "reflect pad",
    "batch_norm", "group_norm", "cross_entropy", "select", "sum", "view", "bicubic", "merged",
)  # fmt: skip


def example(name: str) -> tuple[Function, list[torch.Tensor]]:
    """A function of a batch, and the other tensors that it takes."""
    if name in BATCH:
        return BATCH[name], []
    if name in HERE:
        return HERE[name][0], list(HERE[name][1])
    function, shapes = FUNCTIONS[name]
    return function, [torch.linspace(0.5, 1, shape[0], dtype=torch.float64) for shape in shapes]


def run(function: Function, x: Any, rest: list[Any]) -> list[torch.Tensor]:
    """The result, and the gradients for numbers of its own."""
    leaves = [x, *rest]
    result = function(*leaves)
    # Nothing that adds up to nearly nothing, of which rounding would be all.
    seed: Any = torch.arange(result.numel(), dtype=torch.float64).mul(0.9).cos().add(0.5).reshape(result.shape)
    if isinstance(result, DTensor):
        seed = place(seed, result.device_mesh, places_of(result))
    gradients = torch.autograd.grad(result, leaves, seed if result.dim() else None)
    values = (result.detach(), *gradients)
    return [value.full_tensor() if isinstance(value, DTensor) else value for value in values]


def check(mesh: DeviceMesh, case: tuple[str, int, str], changing: int = 0) -> int:
    """How often the function was compiled."""
    name, dim, how = case
    torch._dynamo.reset()
    function, rest = example(name)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with convmesh.enable():
        dynamic = {"dynamic": True} if how == "dynamic" else {}
        compiled = torch.compile(function, fullgraph=True, backend=counter, **dynamic)
        for size in FEW if changing or how == "marked" else SIZES:
            shape = [*SHAPE[:changing], size, *SHAPE[changing + 1 :]]
            x = torch.arange(prod(shape), dtype=torch.float64).mul(0.7).sin().reshape(shape)
            placed = place(x, mesh, (dim,)).requires_grad_()
            if how == "marked":
                torch._dynamo.mark_dynamic(placed, 0)
            others = [distribute_tensor(other, mesh, [Replicate()]).requires_grad_() for other in rest]
            expected = run(function, x.requires_grad_(), [other.clone().requires_grad_() for other in rest])
            for mine, wanted in zip(run(compiled, placed, others), expected, strict=True):
                assert_close(mine, wanted)
    return int(counter.frame_count)


def test_a_changing_batch(pool: Pool) -> None:
    """Of a symbol, even and uneven sizes are compiled apart, and the first number before there is a symbol."""
    cases = [(name, 2 * (number % 2), "automatic") for number, name in enumerate(SAMPLE)]
    for case, counts in zip(cases, pool.run_cases(check, cases, mesh=(2,)), strict=True):
        assert max(counts) <= 4, (case, counts)


def test_a_changing_height(pool: Pool) -> None:
    """Rules that need numbers specialise to them: every size is compiled, and right."""
    names = [name for name in ("network", *SAMPLE) if name != "linear"]
    pool.run_cases(partial(check, changing=2), [(name, 2, "automatic") for name in names], mesh=(2,))


def test_a_marked_batch(pool: Pool) -> None:
    names = (*SAMPLE[::2], "merged")
    pool.run_cases(check, [(name, 2 - 2 * (number % 2), "marked") for number, name in enumerate(names)], mesh=(2,))


def test_everything_dynamic(pool: Pool) -> None:
    names = ("elementwise", "convolution", "batch_norm", "view")
    pool.run_cases(check, [(name, 0, "dynamic") for name in names], mesh=(2,))


def test_parts_of_a_marked_batch(pool: Pool) -> None:
    """Marked sizes stay symbols: torch raises where a rule makes a number of one."""
    pool.run_cases(check, [(name, 0, "marked") for name in BATCH], mesh=(2,), timeout=600)
