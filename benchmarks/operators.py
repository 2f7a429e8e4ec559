"""One operator of every family: one process with 2 threads, 2 ranks with 1 thread each, and the ranks' bare local part.

The bare local part is the same operator on a rank's own shard, without any exchange. It does the same work: a slice of
a cut dimension is a new tensor, because its parts lie on other ranks than before, so the local part copies it too,
where a slice of one device's tensor is a view. The bare exchange is what convmesh sends, replayed alone. No operator
should take longer than 1.15 local parts and its exchange. A result that torch's DTensor leaves as a pending sum is
added up, as it has to be before it can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import convmesh
from benchmarks.measure import interleave, keep_memory, timed
from tests.harness import Pool

LIMIT = 1.15
IMAGE = (2, 64, 256, 256)
CHANNELS = IMAGE[1]
Shape = tuple[int, ...]


def unpooled(x: Tensor) -> Tensor:
    values, indices = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(values, indices, 2)


def mlp(x: Tensor, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,), weight, bias)
    return F.linear(F.gelu(F.linear(y, up)), down).permute(0, 3, 1, 2)


def squeeze_excite(x: Tensor, down: Tensor, up: Tensor) -> Tensor:
    gate = F.relu(F.conv2d(x.mean((2, 3), keepdim=True), down))
    return x * torch.sigmoid(F.conv2d(gate, up))


def cross_entropy(x: Tensor) -> Tensor:
    return F.cross_entropy(x, x.detach()[:, 0].abs().mul(8).long().clamp(0, CHANNELS - 1))


@dataclass(frozen=True)
class Operator:
    """A function of tensors: the first `cut` of them are sharded along `dim`, the others are parameters."""

    family: str
    run: Callable[..., Tensor]
    shapes: tuple[Shape, ...] = (IMAGE,)
    cut: int = 1
    dim: int = 3
    local_cut: int | None = None  # how many of them the bare local part has cut, where that differs
    local: Callable[..., Tensor] | None = None  # what the bare local part runs, where `run` would do less there


PER_CHANNEL = ((CHANNELS,), (CHANNELS,))
TOKENS = (2, 8, 1024, 32)
OPERATORS = {
    "max_pool k3 s2": Operator("pooling", lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool k2": Operator("pooling", lambda x: F.avg_pool2d(x, 2)),
    "adaptive_avg_pool 7": Operator("pooling", lambda x: F.adaptive_avg_pool2d(x, 7)),
    "max_unpool": Operator("pooling", unpooled),
    "batch_norm, training": Operator(
        "normalisation", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (IMAGE, *PER_CHANNEL)
    ),
    "group_norm": Operator("normalisation", lambda x, w, b: F.group_norm(x, 8, w, b), (IMAGE, *PER_CHANNEL)),
    "layer_norm over space": Operator("normalisation", lambda x: F.layer_norm(x, x.shape[2:])),
    "instance_norm": Operator("normalisation", lambda x: F.instance_norm(x)),
    "bilinear x2": Operator(
        "resampling", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((1, 32, 256, 256),)
    ),
    "pixel_shuffle": Operator("resampling", lambda x: F.pixel_shuffle(x, 2)),
    "reflect pad": Operator("padding", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect")),
    "slice and cat": Operator(
        "indexing",
        lambda x: torch.cat([x[..., 1:], x[..., :1]], 3),
        local=lambda x: torch.cat([x[..., 1:].contiguous(), x[..., :1].contiguous()], 3),
    ),
    "roll": Operator("indexing", lambda x: x.roll(3, 3)),
    "ConvNeXt MLP": Operator(
        "linear", mlp, ((1, CHANNELS, 96, 96), *PER_CHANNEL, (4 * CHANNELS, CHANNELS), (CHANNELS, 4 * CHANNELS))
    ),
    "squeeze-excite": Operator(
        "linear", squeeze_excite, (IMAGE, (CHANNELS // 4, CHANNELS, 1, 1), (CHANNELS, CHANNELS // 4, 1, 1))
    ),
    "attention": Operator("linear", F.scaled_dot_product_attention, (TOKENS,) * 3, cut=3, dim=2, local_cut=1),
    "cross_entropy": Operator("losses", cross_entropy),
    "mse_loss": Operator("losses", lambda x, y: F.mse_loss(x, y), (IMAGE, IMAGE), cut=2),
    "mean over space": Operator("reductions", lambda x: x.mean((2, 3))),
    "amax over space": Operator("reductions", lambda x: x.amax((2, 3))),
    "dropout": Operator("random", lambda x: F.dropout(x, 0.1)),
}
PARAMETERS = [(256, 256, 3, 3)] * 8
STEPS = {"AdamW, fused step": {"fused": True}, "AdamW, foreach step": {"foreach": True}}


def tensors(shapes: Sequence[Shape]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape) for shape in shapes]


def differentiable(
    function: Callable[..., Tensor], given: Sequence[Tensor], backward: bool
) -> Callable[[], list[Tensor]]:
    leaves = [t.detach().requires_grad_(backward) for t in given]
    gradient = _ones(function(*(t.detach() for t in given))) if backward else None

    def run() -> list[Tensor]:
        y = function(*leaves)
        return [_settled(y), *(torch.autograd.grad(y, leaves, gradient) if backward else [])]

    return run


def _settled(result: Tensor) -> Tensor:
    """Without pending sums."""
    if not isinstance(result, DTensor) or not any(isinstance(p, Partial) for p in result.placements):
        return result
    whole = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
    return result.detach().redistribute(placements=whole)


def _ones(like: Tensor) -> Tensor:
    ones = torch.ones(like.shape)
    if not isinstance(like, DTensor):
        return ones
    placements = [Replicate() if isinstance(p, Partial) else p for p in like.placements]
    return distribute_tensor(ones, like.device_mesh, placements, src_data_rank=None)


def optimizing(parameters: Sequence[Tensor], options: dict[str, bool]) -> Callable[[], list[Tensor]]:
    leaves = [t.detach().requires_grad_() for t in parameters]
    for leaf in leaves:
        leaf.grad = leaf.detach().clone()
    optimizer = torch.optim.AdamW(leaves, **options)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        optimizer.step()
        return leaves

    return run


def work(name: str, given: Sequence[Tensor], backward: bool, local: bool = False) -> Callable[[], list[Tensor]]:
    if name in STEPS:
        return optimizing(given, STEPS[name])
    operator = OPERATORS[name]
    return differentiable(operator.local or operator.run if local else operator.run, given, backward)


def shapes_of(name: str) -> Sequence[Shape]:
    return PARAMETERS if name in STEPS else OPERATORS[name].shapes


class Messages(TorchDispatchMode):
    """The collectives that ran, to be run again alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "_c10d_functional" in str(func) and "wait" not in str(func):
            self.calls.append((func, tree_map(lambda a: torch.ones_like(a) if torch.is_tensor(a) else a, args)))
        return func(*args, **(kwargs or {}))

    def replay(self) -> None:
        for func, args in self.calls:
            torch.ops._c10d_functional.wait_tensor(func(*args))


class Rank:
    """One rank's side of the measurement; lives in the worker between the calls."""

    work: dict[str, Callable[[], object]]


def prepare(mesh: DeviceMesh, name: str, backward: bool) -> bool:
    """Get ready, and tell whether torch's DTensor alone is right, and so worth comparing with."""
    keep_memory()
    Rank.work = {}
    whole = tensors(shapes_of(name))
    cut = 0 if name in STEPS else OPERATORS[name].cut
    dim = 0 if name in STEPS else OPERATORS[name].dim
    places: list[Placement] = [Shard(dim) if number < cut else Replicate() for number in range(len(whole))]
    placed = [distribute_tensor(t, mesh, [p], src_data_rank=None) for t, p in zip(whole, places, strict=True)]
    convmesh.enable()
    Rank.work["convmesh"] = work(name, placed, backward)
    messages = Messages()
    with messages:
        Rank.work["convmesh"]()
    Rank.work["exchange"] = messages.replay
    local = [t.to_local() for t in placed]
    fewer = None if name in STEPS else OPERATORS[name].local_cut
    Rank.work["local"] = work(name, local if fewer is None else [*local[:fewer], *whole[fewer:]], backward, local=True)
    for ready in ("local", "exchange"):
        Rank.work[ready]()
    return _stock_is_right(mesh, name)


def _stock_is_right(mesh: DeviceMesh, name: str) -> bool:
    if name in STEPS or "dropout" in name:
        return False  # the state has changed by now, and so has the generator's
    ours = [_whole(t) for t in Rank.work["convmesh"]()]  # type: ignore[attr-defined]
    convmesh.disable()
    try:
        theirs = [_whole(t) for t in Rank.work["convmesh"]()]  # type: ignore[attr-defined]
        right = all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
    except Exception:
        right = False  # there is no such operator, or not for these placements
    convmesh.enable()
    agreed = torch.tensor([float(right)])
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=mesh.get_group())
    return bool(agreed.item())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def measure(mesh: DeviceMesh, what: str) -> float:
    """Seconds from the moment all ranks begin until this one is done.

    A first call is not timed: it would pay for what was measured before it, which has left the process' memory to the
    system, or has switched the rules off and on again.
    """
    if what == "stock":
        convmesh.disable()
    task = Rank.work["convmesh" if what == "stock" else what]
    task()
    dist.barrier(mesh.get_group())
    seconds = timed(task)
    convmesh.enable()
    return seconds


def run(pool: Pool, console: Console, rounds: int) -> None:
    torch.set_num_threads(2)
    keep_memory()
    table = Table("operator", title="2 ranks x 1 thread, each cut in two (medians; forward / forward + backward)")
    for heading in (
        "one process (ms)", "convmesh / one", "convmesh / local part", "exchange (ms)",
        f"convmesh / ({LIMIT} local + exchange)", "convmesh / stock",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for name in track([*OPERATORS, *STEPS], description="operators", console=console):
        ways = (True,) if name in STEPS else (False, True)
        table.add_row(name, *_cells([_measure(pool, name, backward, rounds) for backward in ways]))
    console.print(table)


def _measure(pool: Pool, name: str, backward: bool, rounds: int) -> dict[str, float]:
    stock = all(pool.run(prepare, name, backward, mesh=(2,), timeout=600))
    single = work(name, tensors(shapes_of(name)), backward)
    single()

    def ranks(what: str) -> Callable[[], float]:
        return lambda: max(pool.run(measure, what, mesh=(2,), timeout=600))

    def alone() -> float:
        single()
        return timed(single)

    candidates: dict[str, Callable[[], float]] = {"single": alone}
    candidates |= {what: ranks(what) for what in ("convmesh", "local", "exchange", *(["stock"] if stock else []))}
    return interleave(candidates, rounds)


def _cells(results: list[dict[str, float]]) -> list[str]:
    def ratio(of: Callable[[dict[str, float]], float | None]) -> str:
        return " / ".join("" if value is None else f"{value:.2f}" for value in map(of, results))

    return [
        ratio(lambda r: r["single"] * 1e3),
        ratio(lambda r: r["convmesh"] / r["single"]),
        ratio(lambda r: r["convmesh"] / r["local"]),
        ratio(lambda r: r["exchange"] * 1e3),
        ratio(lambda r: r["convmesh"] / (LIMIT * r["local"] + r["exchange"])),
        ratio(lambda r: r["convmesh"] / r["stock"] if "stock" in r else None),
    ]
