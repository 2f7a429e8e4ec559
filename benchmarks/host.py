"""Host time: what Python and torch's dispatcher take for a call, on torch's fake process group, where nothing is sent.

On a GPU it is the floor of a step: kernels of small tensors take less than it takes to launch them. So tensors are tiny
here, there is one thread, of which the processor's time is taken, and every call was made before. Operators of convmesh
on a tensor that is sharded over space are compared with those of stock DTensor on the same tensor, or, where stock
DTensor has no rule, with plain PyTorch. Its convolution is wrong there, and gets one that is sharded over the batch.
Local tensors have the same shape. Whole training steps are compared with plain PyTorch, and so is the number of
operators on local tensors in them: each that computes is a launch on a GPU. Views and new memory are counted apart, and
collectives not at all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh
from benchmarks.measure import interleave
from convmesh.kernels import norms
from convmesh.models import UNet, resnet50
from tests.harness import Pool

RANKS, RANK = 4, 1  # one in the middle, with two neighbours
CALLS = 20  # of an operator, timed together
Work = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """Something to call: `make(x)` of the tensor that it works on, forward and, if it `learns`, backward."""

    name: str
    make: Callable[[Tensors], Callable[[Tensor], Tensor]]
    shape: tuple[int, ...] = (4, 8, 8, 8)  # of the local tensor
    stock: int | None = 2  # the dimension that is sharded for stock DTensor; None where plain PyTorch is the measure
    limit: float = 1.0
    learns: bool = True


@dataclass(frozen=True)
class Tensors:
    """Makes the tensors of a row: on one device, or on a mesh with dimension `dim` sharded."""

    mesh: DeviceMesh | None
    dim: int = 0

    def sharded(self, shape: tuple[int, ...], dim: int | None = None) -> Tensor:
        at = self.dim if dim is None else dim
        return self._placed(torch.randn(shape), Shard(at), at)

    def replicated(self, *shape: int) -> Tensor:
        return self._placed(torch.randn(shape), Replicate())

    def labels(self, classes: int, shape: tuple[int, ...]) -> Tensor:
        """Sharded as what they are the labels of, which has channels; replicated where they are labels of samples."""
        labels, at = torch.randint(classes, shape), self.dim - 1
        return self._placed(labels, Shard(at), at) if len(shape) > at else self._placed(labels, Replicate())

    def module(self, module: nn.Module) -> nn.Module:
        """With its parameters and buffers replicated."""
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False):
                child.register_parameter(name, nn.Parameter(self._placed(parameter.data, Replicate())))
            for name, buffer in child.named_buffers(recurse=False):
                child.register_buffer(name, self._placed(buffer, Replicate()))
        return module

    def _placed(self, local: Tensor, placement: Any, dim: int | None = None) -> Tensor:
        if self.mesh is None:
            return local
        sizes = list(local.shape)
        if dim is not None:
            sizes[dim] *= self.mesh.size()
        stride = torch.empty(sizes, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, [placement], run_check=False, shape=torch.Size(sizes), stride=stride
        )


def _convolution(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    weight = tensors.replicated(8, 8, 3, 3).requires_grad_()
    return lambda x: F.conv2d(x, weight, padding=1)


def _linear(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    layer = tensors.module(nn.Linear(8, 8))
    return lambda x: layer(x)


def _cross_entropy(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    labels = tensors.labels(8, (4, 8, 8))
    return lambda x: F.cross_entropy(x, labels)


def _add(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    other = tensors.sharded((4, 8, 8, 8))
    return lambda x: x + other


def _cat(tensors: Tensors) -> Callable[[Tensor], Tensor]:
    other = tensors.sharded((4, 8, 8, 8))
    return lambda x: torch.cat([x, other], 1)


def _optimizer(tensors: Tensors, **options: bool) -> Callable[[Tensor], Tensor]:
    parameters = [tensors.replicated(8, 8, 3, 3).requires_grad_() for _ in range(16)]
    for parameter in parameters:
        parameter.grad = tensors.replicated(8, 8, 3, 3)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)

    def step(x: Tensor) -> Tensor:
        optimizer.step()
        return x

    return step


ROWS = (
    Row("convolution 3x3", _convolution, stock=0, limit=2),
    Row("batch norm", lambda tensors: tensors.module(nn.BatchNorm2d(8))),
    Row("max pool 3 s2", lambda tensors: lambda x: F.max_pool2d(x, 3, 2, 1)),
    Row("linear", _linear),
    Row("cross entropy", _cross_entropy),
    Row("cat", _cat),
    Row("interpolate", lambda tensors: partial(F.interpolate, scale_factor=2, mode="bilinear"), stock=None, limit=3),
    Row("relu", lambda tensors: torch.relu),
    Row("add", _add),
    Row("AdamW, fused", partial(_optimizer, fused=True), learns=False),
    Row("AdamW, foreach", partial(_optimizer, foreach=True), learns=False),
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dense: bool


# Narrow ones, of which a kernel takes no time.
NETWORKS = (
    Network("ResNet-50", lambda: resnet50(num_classes=4, width=8), (1, 3, 64, 64), False),
    Network("U-Net 3-d", lambda: UNet(3, 1, 2, (8, 8, 8), (2, 2)), (1, 1, 16, 8, 8), True),
)
STEP_LIMIT, OPERATOR_LIMIT, VIEW_LIMIT = 4.0, 1.5, 3.0


def _step(network: Network, mesh: DeviceMesh | None) -> Work:
    torch.manual_seed(0)
    model = network.build() if mesh is None else convmesh.distribute(network.build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tensors = Tensors(mesh, 2)
    x = tensors.sharded(network.shape)
    samples, _, *space = network.shape
    target = tensors.labels(2, (samples, *space) if network.dense else (samples,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


class CountOperators(TorchDispatchMode):
    """Counts operators on local tensors: those that compute, and those that make views or memory."""

    def __init__(self) -> None:
        super().__init__()
        self.computing = self.views = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if operator.namespace == "aten":
            parts = self._parts(operator, args, kwargs or {})
            if parts is not NotImplemented:
                return parts
            if operator.is_view or operator._schema.name.startswith(("aten::empty", "aten::new_empty")):
                self.views += 1
            else:
                self.computing += 1
        return operator(*args, **kwargs or {})

    def _parts(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """What is made of other operators counts as these: `to` and `reshape` may be nothing at all."""
        if not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            return NotImplemented
        with self:
            return operator.decompose(*args, **kwargs)


def _count(work: Work) -> tuple[int, int]:
    """Operators that compute, the compiled ones of norms among them, and the others."""
    called, counter = 0, CountOperators()
    call = norms._call

    def counted(*args: Any) -> None:
        nonlocal called
        called += 1
        call(*args)

    norms._call = counted
    try:
        with counter:
            work()
    finally:
        norms._call = call
    return counter.computing + called, counter.views


def _calls(row: Row, mesh: DeviceMesh | None, dim: int) -> Iterator[tuple[str, Work]]:
    tensors = Tensors(mesh, dim)
    function = row.make(tensors)
    x = tensors.sharded(row.shape).requires_grad_(row.learns)
    if not row.learns:
        yield "", lambda: function(x)
        return
    y = function(x)
    gradient = torch.ones_like(y)
    yield "forward", lambda: function(x)
    yield "backward", lambda: y.backward(gradient, retain_graph=True)


def _steady(work: Work, calls: int, enabled: bool) -> Callable[[], float]:
    """Seconds of a call among others like it, with the rules of convmesh or with those of DTensor itself."""

    def measure() -> float:
        with convmesh.enable() if enabled else _stock():
            for _ in range(3):
                work()
            start = thread_time()
            for _ in range(calls):
                work()
            return (thread_time() - start) / calls

    return measure


@contextmanager
def _stock() -> Iterator[None]:
    convmesh.disable()
    try:
        yield
    finally:
        convmesh.enable()


def _rows(mesh: DeviceMesh, rounds: int, chosen: str) -> Iterator[dict[str, Any]]:
    for row in ROWS:
        if chosen not in row.name:
            continue
        with _stock():
            other = list(_calls(row, None if row.stock is None else mesh, row.stock or 0))
        ours = _calls(row, mesh, 2)
        for (way, reference), (_, work) in zip(other, ours, strict=True):
            seconds = interleave(
                {"reference": _steady(reference, CALLS, row.stock is None), "convmesh": _steady(work, CALLS, True)},
                rounds,
            )
            yield {
                "name": f"{row.name}, {way}".rstrip(", "), "against": "plain" if row.stock is None else "stock",
                "limit": row.limit, **seconds,
            }  # fmt: skip


def _networks(mesh: DeviceMesh, rounds: int, chosen: str) -> Iterator[dict[str, Any]]:
    for network in NETWORKS:
        if chosen not in network.name:
            continue
        works = {"reference": _step(network, None), "convmesh": _step(network, mesh)}
        seconds = interleave({name: _steady(work, 2, True) for name, work in works.items()}, rounds)
        counts = {name: _count(work) for name, work in works.items()}
        yield {"name": network.name, "against": "plain", "limit": STEP_LIMIT, **seconds}
        for number, (what, limit) in enumerate((("operators", OPERATOR_LIMIT), ("views and memory", VIEW_LIMIT))):
            found = {name: counted[number] for name, counted in counts.items()}
            yield {"name": f"{network.name}, {what}", "against": "plain", "limit": limit, **found}


def measure(rounds: int, chosen: str) -> None:
    """Print what was measured, a line each."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=RANK, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("h",))
    convmesh.enable()
    for found in (*_rows(mesh, rounds, chosen), *_networks(mesh, rounds, chosen)):
        print(json.dumps(found), flush=True)


def run(pool: Pool, console: Console, rounds: int) -> None:
    table = Table("", title="host time of known calls, one thread, fake process group (us), and operators (number)")
    for heading in ("against", "reference", "convmesh", "convmesh / reference", "at most"):
        table.add_column(heading, justify="right")
    command = [sys.executable, "-m", "benchmarks.host", str(rounds)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    for row in map(json.loads, lines.splitlines()):
        table.add_row(row["name"], row["against"], *_cells(row))
    console.print(table)


def _cells(row: Mapping[str, Any]) -> list[str]:
    times = isinstance(row["convmesh"], float)
    numbers = [f"{row[who] * 1e6:.0f}" if times else str(row[who]) for who in ("reference", "convmesh")]
    return [*numbers, f"{row['convmesh'] / row['reference']:.2f}", f"{row['limit']:g}"]


if __name__ == "__main__":
    measure(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
