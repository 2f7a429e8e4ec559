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
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_module, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh
from benchmarks.host_rows import NETWORKS, OPERATOR_LIMIT, ROWS, STEP_LIMIT, VIEW_LIMIT, Network, Row, Tensors
from benchmarks.measure import interleave
from convmesh.kernels import norms
from tests.harness import Pool

RANKS, RANK = 4, 1  # one in the middle, with two neighbours
CALLS = 20  # of an operator, timed together
Work = Callable[[], object]


def _step(network: Network, mesh: DeviceMesh | None, stock: bool = False) -> Work:
    """On one device, or on a mesh: sharded over space, or over the batch for stock DTensor."""
    torch.manual_seed(0)
    model = network.build()
    if mesh is not None:
        model = distribute_module(model, mesh) if stock else convmesh.distribute(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tensors = Tensors(mesh, 0 if stock else 2)
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
    """Operators that compute, the compiled ones of norms among them, and the others. Of the least of three steps: one
    whose number is a power of two also compares what ranks have."""
    return min(_count_once(work) for _ in range(3))


def _count_once(work: Work) -> tuple[int, int]:
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
        ways = {name: _steady(work, 2, True) for name, work in works.items()}
        if network.stock:
            with _stock():
                ways["stock"] = _steady(_step(network, mesh, stock=True), 2, False)
        seconds = interleave(ways, rounds)
        counts = {name: _count(work) for name, work in works.items()}
        if network.stock:
            of_stock = {"reference": seconds.pop("stock"), "convmesh": seconds["convmesh"]}
            yield {"name": network.name, "against": "stock", "limit": 1.0, **of_stock}
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
