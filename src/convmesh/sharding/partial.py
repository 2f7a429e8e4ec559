"""Sums of Partial tensors, computed once: the sum is kept with the tensor, so that later uses find it.

An optimizer uses a gradient several times, and only the first use communicates. The tensor itself stays Partial, even
if nothing else refers to its storage: only this rank knows whether something does, and ranks that decided by that would
communicate differently. A sum is valid until an operator writes into the tensor or a view of it, which all ranks do
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from functools import lru_cache

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils.weak import WeakTensorKeyDictionary

from .. import _torch, comm
from . import copy_notes, installation, view_writeback
from .assign import assign
from .errors import refuse
from .layout import Layout, is_sum
from .plan_cache import planned

Placements = tuple[Placement, ...]

# For each tensor its sum, which is noted as a copy (`copy_notes`), and the version of the local tensor that was summed.
_cached_sums: MutableMapping[DTensor, tuple[DTensor, int]] = WeakTensorKeyDictionary()


@planned
def _reduction(spec: _torch.Spec) -> tuple[tuple[int, ...], Layout]:
    """Return the mesh dimensions over which a tensor must be summed, and its layout afterwards."""
    layout = Layout.of(spec)
    mesh_dims = tuple(mesh_dim for mesh_dim, placement in enumerate(layout.placements) if is_sum(placement))
    placements: Placements = tuple(
        Replicate() if isinstance(placement, Partial) else placement for placement in layout.placements
    )
    return mesh_dims, layout.placed(placements)


def reduce_once(tensors: Iterable[DTensor], like: Mapping[int, DTensor] | None = None) -> dict[int, DTensor]:
    """Return the reduced DTensors of those of `tensors` that are Partial, by id; all are sent in few messages.

    `like` maps ids to the tensors that the sums are used with, whose placements they get. A caller that writes into a
    sum calls `write_sum_back` afterwards.
    """
    goals = {key: tensor.placements for key, tensor in (like or {}).items()}
    waiting = {
        id(tensor): tensor
        for tensor in tensors
        if is_partial(tensor) or goals.get(id(tensor), tensor.placements) != tensor.placements
    }
    known = {key: found for key, tensor in waiting.items() if (found := cached_sum(tensor)) is not None}
    unknown = [key for key in waiting if key not in known]
    sums = {key: (_torch.local_of(found), Layout.of(_torch.spec_of(found))) for key, found in known.items()} | dict(
        zip(unknown, _reduced([waiting[key] for key in unknown]), strict=True)
    )
    return {
        key: known[key]
        if key in known and goals.get(key, known[key].placements) == known[key].placements
        else _cache_sum(tensor, *_moved(*sums[key], goals.get(key)))
        for key, tensor in waiting.items()
    }


def is_partial(tensor: DTensor) -> bool:
    return _has_partial(tensor.placements)


@lru_cache(maxsize=1024)
def _has_partial(placements: tuple[Placement, ...]) -> bool:
    return any(isinstance(placement, Partial) for placement in placements)


def cached_sum(tensor: DTensor) -> DTensor | None:
    """Return the sum of a Partial tensor if it was taken before and is still valid, else None."""
    entry = None if _torch.tracing() else _cached_sums.get(tensor)
    if entry is None or not copy_notes.is_up_to_date(entry[0], tensor):
        return None
    found, version = entry
    if version != _torch.version_of(_torch.local_of(tensor)):
        raise refuse("a Partial tensor", "its local tensor on this rank was written after its sum had been taken, "
                     "which the other ranks cannot know", [("tensor", tensor)],
                     "write into the DTensor itself, on all ranks; or into what to_local() gives before its first use"
                     )  # fmt: skip
    return found


def write_sum_back(tensor: DTensor, sum: DTensor) -> None:
    """Write a modified sum back into `tensor`, which keeps it as its sum."""
    if not view_writeback.put_back(sum):
        assign(tensor, sum)


def _cache_sum(tensor: DTensor, local: torch.Tensor, layout: Layout) -> DTensor:
    made = _torch.wrap(local, layout.spec)
    if not _torch.tracing() and copy_notes.mark(made, tensor, _sum_of, lambda full, part: part, False):
        installation.guard_writes()
        _torch.relocate(tensor, _torch.local_of(tensor), _torch.spec_of(tensor))  # unwraps a finished collective
        _cached_sums[tensor] = made, _torch.version_of(_torch.local_of(tensor))
    return made


def _sum_of(tensor: DTensor) -> DTensor:
    return reduce_once([tensor]).get(id(tensor), tensor)


def _moved(local: torch.Tensor, layout: Layout, goal: Placements | None) -> tuple[torch.Tensor, Layout]:
    if goal is None or goal == layout.placements:
        return local, layout
    target = layout.placed(goal)
    if layout.mesh.get_coordinate() is not None:
        local = _torch.redistribute(local, layout.spec, target.spec)
    return local, target


def _reduced(tensors: list[DTensor]) -> list[tuple[torch.Tensor, Layout]]:
    """Return (local tensor, layout) of each reduced tensor."""
    results: list[tuple[torch.Tensor, Layout]] = []
    terms: list[comm.Term] = []
    places: list[int] = []
    for tensor in tensors:
        spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
        mesh_dims, target = _reduction(spec)
        if target.placements != spec.placements and spec.mesh.get_coordinate() is not None:
            if len(mesh_dims) == sum(isinstance(placement, Partial) for placement in spec.placements):
                terms.append(comm.Term(local, spec.mesh, mesh_dims))
                places.append(len(results))
            else:  # a Partial average or extreme: rare, and torch reduces each of them
                local = _torch.redistribute(local, spec, target.spec)
        results.append((local, target))
    for place, local in zip(places, comm.sum_in_buckets(terms), strict=True):
        results[place] = (local, results[place][1])
    return results
