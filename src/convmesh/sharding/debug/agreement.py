"""The fingerprint of each collective, which its ranks compare before they start it (`enable(check=True)`).

Ranks that take different paths through the code would wait for each other forever, or reduce unrelated values. Here
each rank writes a fingerprint into the store of the process group and reads those of the others. So all of them see the
same difference and raise alike, and a missing rank is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ... import _torch, comm
from ..._torch import Operator
from .. import installation
from .rendezvous import Fingerprint, agree

_REMEMBERED = 100


@dataclass
class _Path:
    """This rank's history in one group: the number of collectives so far, and the operators since the last one."""

    communications: int = 0
    operators: list[str] = field(default_factory=list)

    def note(self, operator: str) -> None:
        self.operators.append(operator)
        if len(self.operators) > 2 * _REMEMBERED:  # this group may have no collective for a long time
            earlier = blake2b("\n".join(self.operators[:_REMEMBERED]).encode(), digest_size=8).hexdigest()
            self.operators[:_REMEMBERED] = [f"earlier ones ({earlier})"]


_paths: WeakKeyDictionary[dist.ProcessGroup, _Path] = WeakKeyDictionary()
_timeout: float | None = None
_undo: list[Callable[[], None]] = []


def checking() -> bool:
    return bool(_undo)


def begin(timeout: float | None) -> None:
    """Start comparing; a rank is reported missing after `timeout` seconds, by default after the timeout of its group.

    Does nothing on simulated ranks: their process group compares them, and each would switch this on and off for all.
    """
    global _timeout
    if _torch.ranks_are_threads():
        return
    _timeout = timeout
    if not checking():
        _undo.extend([comm.observe(_compare), installation.observe(_note)])


def end() -> None:
    while _undo:
        _undo.pop()()
    for path in _paths.values():  # the counts go on: the last fingerprints are still in the store
        path.operators.clear()


def _path(group: dist.ProcessGroup) -> _Path:
    return _paths.setdefault(group, _Path())


def _note(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record an operator on sharded or Partial tensors. On replicated ones, a rank may run operators by itself."""
    if _torch.tracing():
        return
    values = (*args, *kwargs.values())
    described = f"{operator}({', '.join(map(_describe, values))})"
    for mesh in {tensor.device_mesh for tensor in _distributed(values)}:
        for group in _groups(mesh):
            _path(group).note(described)


def _distributed(values: Iterable[object]) -> Iterator[DTensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _distributed(value)
        elif isinstance(value, DTensor) and any(not isinstance(placement, Replicate) for placement in value.placements):
            yield value


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    return [] if mesh.get_coordinate() is None else mesh.get_all_groups()


def _describe(value: object) -> str:
    """Describe a value in text that is the same on all ranks, so without local sizes and computed values."""
    if isinstance(value, DTensor):
        placements = "".join(str(placement) for placement in value.placements)
        return f"{tuple(value.shape)} {value.dtype} {placements}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value) if isinstance(value, bool | int | str | None) else type(value).__name__


def _compare(operator: Operator, args: tuple[Any, ...], group: dist.ProcessGroup) -> None:
    path = _path(group)
    name, tensors = _torch.name_of(operator), args[0] if isinstance(args[0], list) else [args[0]]
    sends: list[int] = []
    receives: list[int] = []
    if name == "all_to_all_single":  # sizes may differ between ranks, as long as sender and receiver agree
        receives, sends = list(args[1]), list(args[2])
        what = f"{name} of {tensors[0].dtype}"
    else:
        shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        what = f"{name} of {shapes}{''.join(f', {value}' for value in args[1:-1])}"
    mine = Fingerprint(
        what, tuple(path.operators), tuple(sends), tuple(receives), comm.caller() or "an unknown location"
    )
    number, path.communications, path.operators = path.communications, path.communications + 1, []
    timeout = _torch.timeout_of(group, tensors[0].device.type).total_seconds() if _timeout is None else _timeout
    try:
        agree(mine, group, number, timeout)
    except dist.DistError as error:
        raise comm.CommunicationError(
            f"the store through which ranks compare what they do cannot be reached from rank {dist.get_rank()}\n"
            f"  reason: {error}\n"
            f"  remedy: see whether its host still runs (the first rank, or the launcher), and start again"
        ) from error
