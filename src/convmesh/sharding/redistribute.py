"""What every rule begins and ends with: checking the tensors, moving them to where the plan has them, wrapping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch
from ..comm import Line, from_owner, line, owner_plan, rebox, swap
from ..geometry import Box
from ..strides import usual
from .errors import PlainTensor, ShardingError, refuse
from .layout import Layout
from .plan_cache import planned

Named = Sequence[tuple[str, Any]]


def specs_of(operator: str, named: Named) -> list[Any]:
    """The keys of a plan: where each tensor lies, None for one that is not given. A plain tensor is refused."""
    try:
        return [None if tensor is None else _torch.spec_of(tensor) for _, tensor in named]
    except AttributeError:
        plain = [(name, tensor) for name, tensor in named if not isinstance(tensor, DTensor | None)]
        of_a_model = any(tensor.requires_grad or isinstance(tensor, torch.nn.Parameter) for _, tensor in plain)
        raise refuse(
            operator, f"plain torch.Tensor beside DTensors: {', '.join(name for name, _ in plain)}", named,
            "put the model that has these parameters on the mesh: convmesh.distribute(model, mesh)" if of_a_model else
            "make it a DTensor: convmesh.shard(tensor, mesh, ...), replicated if no dimension is named; or, if it is a "
            "constant that a loss makes, distribute that as well: convmesh.distribute(loss, mesh), or call it within "
            "convmesh.implicit_replication(mesh)",
            PlainTensor,
        ) from None  # fmt: skip


def layouts_of(operator: str, named: Sequence[tuple[str, _torch.Spec | None]]) -> list[Any]:
    """What a plan is made from: all tensors on one mesh, dimensions cut in its own order."""
    layouts = [None if spec is None else Layout.of(spec) for _, spec in named]
    described = [(name, layout) for (name, _), layout in zip(named, layouts, strict=True)]
    given = [(name, spec) for name, spec in named if spec is not None]
    if not _torch.in_rank_order(given[0][1].mesh):
        raise refuse(operator, "ranks do not ascend along every dimension of the mesh", described,
                     "make the mesh with init_device_mesh, or from ranks in ascending order")  # fmt: skip
    check_one_rank(operator, given[0][1].mesh)
    for name, spec in given:
        if spec.mesh != given[0][1].mesh:
            raise refuse(operator, f"{name} is on another mesh than {given[0][0]}", described,
                         "put all of them on one mesh, replicated where they are not sharded")  # fmt: skip
        if not _torch.plain_order(spec):
            raise refuse(operator, f"{name} is cut in an order of mesh dimensions other than the mesh's", described,
                         f"redistribute {name} to plain Shard(dim) placements first")  # fmt: skip
    return layouts


def check_one_rank(operation: str, mesh: DeviceMesh) -> None:
    """A plan is of one rank: of what it owns, sends and receives."""
    if not _torch.is_one_rank(mesh):
        raise ShardingError(
            f"{operation}: torch's LocalTensorMode plays all ranks at once, and rules of convmesh are of one\n"
            "  remedy: torch's fake process group for one rank of a large mesh, its threaded one for several ranks"
        )


def check_placed(operator: str, named: Named) -> list[Any]:
    """All are DTensors on one mesh, cut in its own order. A look-up, once the same layouts have been seen.

    Returns where they lie, the keys of a plan.
    """
    specs = specs_of(operator, named)
    _checked(operator, tuple([name for name, _ in named]), *specs)
    return specs


@planned
def _checked(operator: str, names: tuple[str, ...], *specs: _torch.Spec | None) -> bool:
    layouts_of(operator, list(zip(names, specs, strict=True)))
    return True


def move(tensor: DTensor | None, target: Layout | None) -> Any:
    """This rank's part of `tensor` where the plan has it."""
    if tensor is None or target is None:
        return None
    local = _torch.local_of(tensor)
    if tensor.placements == target.placements:
        if local.shape != target.local_shape and target.mesh.get_coordinate() is not None:
            raise refuse("DTensor", f"this rank's part has shape {tuple(local.shape)}, not {target.local_shape}",
                         [("tensor", tensor)], "cut it as torch.chunk does: that is what Shard means")  # fmt: skip
        return local
    return relocated(local, Layout.of(_torch.spec_of(tensor)), target)


def relocated(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """This rank's part of a tensor that lies as `source` says, where `target` has it. May have gaps."""
    # torch makes a pending sum of what every rank has all of, and of nothing else.
    gathered = source.placed(tuple(
        Replicate() if isinstance(p, Shard) and isinstance(q, Partial) else p
        for p, q in zip(source.placements, target.placements, strict=True)
    ))  # fmt: skip
    if gathered.placements != source.placements:
        local, source = relocated(local, source, gathered), gathered
    while (mesh_dim := _next_swap(source, target)) is not None:
        before, after = source.placements[mesh_dim].dim, target.placements[mesh_dim].dim  # type: ignore[attr-defined]
        left, right = source.placements[:mesh_dim], source.placements[mesh_dim + 1 :]
        whole = source.placed((*left, Replicate(), *right)).own(before)
        local = swap(local, before, whole.size, after, line(source.mesh, (mesh_dim,)))
        source = source.placed((*left, target.placements[mesh_dim], *right))
    boxes = _boxes(source, target)
    if boxes is not None:
        local, source = rebox(local, boxes.owned, boxes.wanted, boxes.line), source.placed(boxes.placements)
    for dim in list(source.cuts):
        if source.shape[dim] == 1 and source.mesh.get_coordinate() is not None:
            local, source = _shared(local, source, target, dim)
    if source.placements != target.placements:
        local = _torch.redistribute(local, source.spec, target.spec)
    return usual(local, target.stride)


def _shared(local: torch.Tensor, source: Layout, target: Layout, dim: int) -> tuple[torch.Tensor, Layout]:
    """The only index of a cut dimension goes to all ranks, where the target has it so: gathering would send padding."""
    mesh_dims = source.cuts[dim]
    if not all(isinstance(target.placements[m], Replicate) for m in mesh_dims):
        return local, source
    placements = tuple(Replicate() if m in mesh_dims else p for m, p in enumerate(source.placements))
    cutting = tuple(m for m in mesh_dims if source.mesh.size(m) > 1)
    if cutting:
        plan = owner_plan(1, 0, tuple(source.mesh.size(m) for m in cutting))
        local, received = from_owner(local, dim, plan, line(source.mesh, cutting))
        local = _torch.tie(local, tokens=[received])
    return local, source.placed(placements)


def _next_swap(source: Layout, target: Layout) -> int | None:
    """A mesh dimension over which another dimension is to be cut, and can be at once; DTensor gathers on gloo for it.

    Other mesh dimensions may cut the two further outside, but not further inside.
    """
    if source.mesh.get_coordinate() is None:
        return None
    for mesh_dim, (before, after) in enumerate(zip(source.placements, target.placements, strict=True)):
        if type(before) is Shard and type(after) is Shard and before != after:
            innermost = source.cuts[before.dim][-1] == mesh_dim
            if innermost and source.cuts.get(after.dim, (-1,))[-1] < mesh_dim:
                return mesh_dim
    return None


@dataclass(frozen=True)
class Boxes:
    """What ranks along a line own of a tensor, and what they want of it, which then lies at `placements`."""

    owned: tuple[Box, ...]
    wanted: tuple[Box, ...]
    placements: tuple[Placement, ...]
    line: Line


@planned
def _boxes(source: Layout, target: Layout) -> Boxes | None:
    """The move of all mesh dimensions over which other dimensions are to be cut; None where there are none of them.

    Those that cut a dimension together move together.
    """
    pairs = list(zip(source.placements, target.placements, strict=True))
    moving = {m for m, (p, q) in enumerate(pairs) if type(p) is Shard and type(q) is Shard and p != q}
    if not moving or source.mesh.get_coordinate() is None:
        return None
    goal = source.placed(tuple(q if m in moving else p for m, (p, q) in enumerate(pairs)))
    while True:
        touched = {p.dim for layout in (source, goal) for m in moving if isinstance(p := layout.placements[m], Shard)}
        found = {m for layout in (source, goal) for dim in touched for m in layout.cuts.get(dim, ())}
        if found <= moving:
            break
        moving |= found
    mesh_dims = tuple(sorted(moving))
    here = {m: source.mesh.get_local_rank(m) for m in range(source.mesh.ndim)}
    ranks = [
        here | dict(zip(mesh_dims, place, strict=True))
        for place in product(*(range(source.mesh.size(m)) for m in mesh_dims))
    ]
    dims = range(len(source.shape))
    owned, wanted = (tuple(tuple(layout.part_at(dim, at) for dim in dims) for at in ranks) for layout in (source, goal))
    return Boxes(owned, wanted, goal.placements, line(source.mesh, mesh_dims))


def move_beside(tensor: DTensor, other: Layout) -> torch.Tensor:
    """This rank's part of `tensor`, cut as another tensor of its shape is."""
    local = _torch.local_of(tensor)
    if tensor.placements == other.placements:
        return local
    source = Layout.of(_torch.spec_of(tensor))
    return relocated(local, source, source.placed(other.placements))


def place(local: torch.Tensor | None, computed: Layout | None, wanted: Layout | None) -> DTensor | None:
    """The DTensor of a result that lies as `computed` says, moved to where it is `wanted`."""
    if local is None or computed is None or wanted is None:
        return None
    if computed.placements != wanted.placements:
        local = relocated(local, computed, wanted)
    # Views of a DTensor are made by its global strides, so the local ones must agree with them.
    return _torch.wrap(local.contiguous(memory_format=wanted.memory_format), wanted.spec)
