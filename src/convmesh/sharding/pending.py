"""Pending sums, reduced once: the result stays in the tensor, so that its next use finds it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from .. import _torch
from ..comm import Term, sum_in_buckets
from .cache import planned
from .layout import Layout, is_sum
from .parts import is_copy

Placements = tuple[Placement, ...]


@planned
def _reduction(spec: _torch.Spec) -> tuple[tuple[int, ...], Layout]:
    """The mesh dimensions over which a tensor is still to be summed, and where it lies afterwards."""
    layout = Layout.of(spec)
    mesh_dims = tuple(mesh_dim for mesh_dim, placement in enumerate(layout.placements) if is_sum(placement))
    placements: Placements = tuple(
        Replicate() if isinstance(placement, Partial) else placement for placement in layout.placements
    )
    return mesh_dims, layout.placed(placements)


def reduce_once(tensors: Iterable[DTensor], like: Mapping[int, DTensor] | None = None) -> dict[int, DTensor]:
    """By id, the tensors of `tensors` that have pending sums, without them; all travel in few messages.

    A tensor is itself put in its new placement, which changes none of its values: an optimizer uses a gradient several
    times, and only the first use sends anything. Only where this cannot be, another DTensor is returned for it: under
    the compiler, which does not see it, and where another tensor shares the memory, and has to see later writes.
    `like` has, by id, the tensors beside which the sums are used, and so where they should lie.
    """
    goals = {key: tensor.placements for key, tensor in (like or {}).items()}
    waiting = {
        id(tensor): tensor
        for tensor in tensors
        if is_pending(tensor) or goals.get(id(tensor), tensor.placements) != tensor.placements
    }
    if not waiting:
        return {}
    reduced = _reduced(list(waiting.values()))
    return {
        key: _keep(tensor, *_moved(*sum, goals.get(key)))
        for (key, tensor), sum in zip(waiting.items(), reduced, strict=True)
    }


def is_pending(tensor: DTensor) -> bool:
    return any(isinstance(placement, Partial) for placement in tensor.placements)


def _moved(local: torch.Tensor, layout: Layout, goal: Placements | None) -> tuple[torch.Tensor, Layout]:
    if goal is None or goal == layout.placements:
        return local, layout
    target = layout.placed(goal)
    if layout.mesh.get_coordinate() is not None:
        local = _torch.redistribute(local, layout.spec, target.spec)
    return local, target


def _reduced(tensors: list[DTensor]) -> list[tuple[torch.Tensor, Layout]]:
    """[this rank's part, where it lies]"""
    results: list[tuple[torch.Tensor, Layout]] = []
    terms: list[Term] = []
    places: list[int] = []
    for tensor in tensors:
        spec, local = _torch.spec_of(tensor), _torch.local_of(tensor)
        mesh_dims, target = _reduction(spec)
        if target.placements != spec.placements and spec.mesh.get_coordinate() is not None:
            if len(mesh_dims) == sum(isinstance(placement, Partial) for placement in spec.placements):
                terms.append(Term(local, spec.mesh, mesh_dims))
                places.append(len(results))
            else:  # an average or an extreme is pending: rare, and torch knows each of them
                local = _torch.redistribute(local, spec, target.spec)
        results.append((local, target))
    for place, local in zip(places, sum_in_buckets(terms), strict=True):
        results[place] = (local, results[place][1])
    return results


def can_relocate(tensor: DTensor) -> bool:
    """Whether a tensor may get other memory: no other shares it, none has to see what is written into it."""
    local = _torch.local_of(tensor)
    return not _torch.tracing() and _torch.owns_storage(local) and not is_copy(local)


def _keep(tensor: DTensor, local: torch.Tensor, target: Layout) -> DTensor:
    if not can_relocate(tensor):
        return _torch.wrap(local, target.spec)
    _torch.relocate(tensor, local, target.spec)
    return tensor
