"""A rank's side of the operator benchmark: convmesh, the bare local part, and that with the exchange in it, by torch's
own collectives, as somebody would write it by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import convmesh
from benchmarks.measure import keep_memory, timed
from benchmarks.operator_rows import OPERATORS, STEPS, shapes_of, tensors, work
from convmesh import _torch


class Messages(TorchDispatchMode):
    """The collectives that ran, in forward and in backward, to be run again alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if "_c10d_functional" in str(func) and "wait" not in str(func):
            alike = tree_map(lambda a: torch.ones_like(a) if torch.is_tensor(a) else a, args)
            self.calls[_torch.in_backward()].append((func, alike))
        return func(*args, **(kwargs or {}))

    def replay(self, in_backward: bool) -> None:
        for func, args in self.calls[in_backward]:
            torch.ops._c10d_functional.wait_tensor(func(*args))


class Rank:
    """One rank's side of the measurement; lives in the worker between the calls."""

    work: dict[str, Callable[[], object]]


def prepare(mesh: DeviceMesh, name: str, backward: bool) -> tuple[bool, bool]:
    """Get ready, and tell whether torch's DTensor alone is right, and so worth comparing with, and whether anything
    is sent."""
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
    local = [t.to_local() for t in placed]
    fewer = None if name in STEPS else OPERATORS[name].local_cut
    given = local if fewer is None else [*local[:fewer], *whole[fewer:]]
    Rank.work["local"] = work(name, given, backward, local=True)
    interrupted = work(name, given, backward, local=True, between=lambda: messages.replay(False))
    Rank.work["local and exchange"] = lambda: (interrupted(), messages.replay(True))
    Rank.work["local and exchange"]()
    return _stock_is_right(mesh, name), any(messages.calls.values())


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


def measure(mesh: DeviceMesh, what: str, calls: int) -> float:
    """Seconds of a call among others of its kind, so that work goes on before and after what is sent.

    A first call is not timed: it would pay for what was measured before it, which has left the process' memory to the
    system, or has switched the rules off and on again.
    """
    if what in ("stock", "local and exchange"):  # both send as torch does it
        convmesh.disable()
    task = Rank.work["convmesh" if what == "stock" else what]
    task()
    dist.barrier(mesh.get_group())
    seconds = timed(task, calls)
    convmesh.enable()
    return seconds
