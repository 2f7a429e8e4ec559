"""Checks that the ranks of a mesh pass parts of one tensor: parts of different ones would silently train garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch, comm
from ..ops.random import noted_draws
from ..sharding.debug.agreement import checking
from ..sharding.errors import ShardingError
from ..sharding.plan_cache import PerProcessGroup

# Values are compared in the first calls on a mesh, and then in calls whose number is a power of two.
FIRST_CALLS = 16
ALIKE = (
    "seed all ranks alike after convmesh.distribute, and let what only some ranks draw (augmentation, figures) have a "
    "generator of its own"
)
_WORD, _ROW, _ROWS = 8, 4096, 64
_TEXT_BYTES, _SHOWN = 512, 8

_calls = PerProcessGroup(dict)  # by mesh: all ranks count alike, because all make their tensors in the same order


def compare(
    operation: str,
    mesh: DeviceMesh,
    facts: str,
    remedy: str,
    *,
    values: Callable[[], torch.Tensor] | None = None,
    copies_along: Sequence[int] = (),
    problem: str | None = None,
) -> None:
    """Raise a `ShardingError` on all ranks of the mesh unless they pass parts of one tensor. All ranks must call this.

    `facts` must be equal on all ranks; `copies_along` must follow from them. The bits of `values()` must be equal on
    ranks that differ along the mesh dimensions `copies_along` only. `problem` is an error that this rank has found by
    itself. Random numbers drawn since the last comparison of values are compared together with the facts.

    On CPUs, facts are compared in every call, by one small message. Another device would have to finish its work first,
    so there facts are compared as often as values.
    """
    thorough = _is_thorough(mesh)
    if thorough is None or not (thorough or mesh.device_type == "cpu"):
        noted_draws.taken(mesh, going_on=False)
        if problem is not None:
            raise ShardingError(f"{operation}: {problem}\n  remedy: {remedy}")
        return
    everybody = range(mesh.ndim)
    digest = int.from_bytes(blake2b(f"{operation} {facts}".encode(), digest_size=7).digest())
    drawn = noted_draws.taken(mesh, going_on=thorough)
    mine = [digest, ~digest, int(problem is not None), drawn, ~drawn]
    greatest, inverted_least, failed, most, inverted_fewest = _greatest(mine, mesh, everybody)
    if failed:
        raise _error(operation, "parts that do not fit", problem or "", mesh, remedy)
    if greatest != ~inverted_least:
        raise _error(operation, "different shapes, types or layouts", facts, mesh, remedy)
    if most != ~inverted_fewest:
        said = f"what was drawn since the last call has checksum {drawn:x}"
        raise _error("dropout or another random operator", "different random numbers", said, mesh, ALIKE)
    if not thorough or values is None or not copies_along:  # from here on the facts are the same, and so all go on
        return
    total = checksum(values())
    greatest, inverted_least = _greatest([total, ~total], mesh, copies_along)
    (differs,) = _greatest([int(greatest != ~inverted_least)], mesh, everybody)
    if differs:
        said = f"{facts}, checksum {total % 2**64:x}"
        raise _error(operation, "different values where they should be equal", said, mesh, remedy)


def _error(operation: str, what: str, said: str, mesh: DeviceMesh, remedy: str) -> ShardingError:
    lines = [f"{operation}: the ranks give {what}", *_said_by_all(said, mesh), f"  remedy: {remedy}"]
    return ShardingError("\n".join(lines))


def _is_thorough(mesh: DeviceMesh) -> bool | None:
    """Whether this call compares values; None if there is nothing to compare."""
    if mesh.get_coordinate() is None or mesh.size() == 1 or torch.compiler.is_compiling() or _torch.tracing():
        return None
    if not _torch.has_values(mesh):
        return None
    calls: dict[DeviceMesh, int] = _calls.get()
    calls[mesh] = number = calls.get(mesh, 0) + 1
    # Simulated ranks are there to find mistakes, and are always checked.
    return number <= FIRST_CALLS or number & (number - 1) == 0 or checking() or _torch.ranks_are_threads()


def _greatest(numbers: list[int], mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[int]:
    """All-reduce each number by maximum along `mesh_dims`. The minimum of `n` is `~max(~n)`."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    if type(mine) is not torch.Tensor:  # fake tensors have no values
        return numbers
    found: list[int] = comm.all_reduce(mine, mesh, mesh_dims, "max").tolist()
    return found


def _said_by_all(text: str, mesh: DeviceMesh) -> list[str]:
    """Return a line for each text that ranks have passed, with the ranks that passed it; empty texts are left out."""
    letters = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b" ")
    mine = torch.tensor(list(letters), dtype=torch.uint8, device=mesh.device_type)
    everybody = comm.all_gather_stacked(mine, mesh, tuple(range(mesh.ndim))).tolist()
    said: dict[str, list[str]] = {}
    for rank, row in zip(mesh.mesh.flatten().tolist(), everybody, strict=True):
        said.setdefault(bytes(row).decode(errors="replace").strip(" \0"), []).append(str(rank))
    said.pop("", None)
    lines = [f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}: {text}" for text, ranks in said.items()]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"  and {len(lines) - _SHOWN} more"]


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of the bits of a tensor and of their order.

    Words of eight bytes are summed with weights, modulo 2^64, some rows at a time, so that they stay in the cache. A
    product loses upper bits (such as signs), so these are mixed into lower ones before.
    """
    tensor = tensor.detach().as_subclass(torch.Tensor)
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.resolve_neg().contiguous()
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    data = data.clone() if data.storage_offset() % _WORD else data
    words, rest = data[: len(data) // _WORD * _WORD].view(torch.int64), data[len(data) // _WORD * _WORD :]
    weights = _scattered(torch.arange(_ROW, device=data.device))
    last = words[len(words) // _ROW * _ROW :]
    total = (_mixed(last) * weights[: len(last)]).sum() + (rest * weights[-_WORD:][: len(rest)]).sum()
    for number, rows in enumerate(words[: len(words) // _ROW * _ROW].view(-1, _ROW).split(_ROWS)):
        sums = _mixed((_mixed(rows) * weights).sum(1))
        total += (sums * _scattered(torch.arange(1, len(sums) + 1, device=data.device) + number * _ROWS)).sum()
    return int(total)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    return words ^ (words >> 29)


def _scattered(numbers: torch.Tensor) -> torch.Tensor:
    """Return an odd pseudo-random weight for each number."""
    mixed = (numbers + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1
