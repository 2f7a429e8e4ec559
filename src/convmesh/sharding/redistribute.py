"""What every rule begins and ends with: checking the tensors, redistributing them, wrapping the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from .. import _torch
from ..comm import Schedule, boxes, broadcast_from_owner, fetch, rank_line, reshard
from ..geometry import Box, Grid, Interval, shards
from ..strides import usual
from .errors import PlainTensor, ShardingError, refuse
from .layout import Layout, is_sum
from .plan_cache import planned

Named = Sequence[tuple[str, Any]]


def specs_of(operator: str, named: Named) -> list[Any]:
    """Return the specs of the tensors, which are the keys of a plan; None for absent ones. Refuses plain tensors."""
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
    """Return the layouts that a plan is made from; refuses several meshes and unusual orders of sharding."""
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
            raise refuse(operator, f"{name} is sharded in an order of mesh dimensions other than the mesh's", described,
                         f"redistribute {name} to plain Shard(dim) placements first")  # fmt: skip
    return layouts


def check_one_rank(operation: str, mesh: DeviceMesh) -> None:
    """Refuse torch's LocalTensorMode, which runs all ranks at once: a plan is for one rank."""
    if not _torch.is_one_rank(mesh):
        raise ShardingError(
            f"{operation}: convmesh does not support LocalTensorMode, in which one process acts for all ranks\n"
            "  remedy: convmesh.simulate, or torch's fake process group for one rank of a large mesh"
        )


def check_placed(operator: str, named: Named) -> list[Any]:
    """Check that all tensors are DTensors on one mesh, sharded in the mesh's order, and return their specs.

    For known layouts this is one look-up.
    """
    specs = specs_of(operator, named)
    _checked(operator, tuple([name for name, _ in named]), *specs)
    return specs


@planned
def _checked(operator: str, names: tuple[str, ...], *specs: _torch.Spec | None) -> bool:
    layouts_of(operator, list(zip(names, specs, strict=True)))
    return True


def move(tensor: DTensor | None, target: Layout | None) -> Any:
    """Return the local tensor of `tensor` redistributed to the layout `target`."""
    if tensor is None or target is None:
        return None
    local = _torch.local_of(tensor)
    if tensor.placements == target.placements:
        if local.shape != target.local_shape and target.mesh.get_coordinate() is not None:
            raise refuse("DTensor", f"this rank's part has shape {tuple(local.shape)}, not {target.local_shape}",
                         [("tensor", tensor)], "shard it as torch.chunk does, as Shard requires")  # fmt: skip
        return local
    return redistribute_local(local, Layout.of(_torch.spec_of(tensor)), target)


def redistribute_local(local: torch.Tensor, source: Layout, target: Layout) -> torch.Tensor:
    """Return a local tensor redistributed from the layout `source` to `target`. The result may have gaps."""
    for step in plan_redistribution(source, target):
        local = step(local)
    return usual(local, target.stride)


@dataclass(frozen=True)
class Exchange:
    """A redistribution step: an exchange from the box that a rank owns to the one it needs, along `dims`."""

    schedule: Schedule
    dims: tuple[int, ...]
    owned: Box
    needed: Box

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        return fetch(self.schedule, local, self.dims, self.owned, self.needed)


@dataclass(frozen=True)
class ByTorch:
    """A redistribution step that DTensor does."""

    source: _torch.Spec
    target: _torch.Spec

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        return _torch.redistribute(local, self.source, self.target)


@dataclass(frozen=True)
class ToPartial:
    """A redistribution step from Replicate to Partial(sum): one rank keeps the values, the others contribute zeros.

    torch divides the values by the number of ranks instead, which rounds, and turns integers into floating point.
    """

    keeps: bool

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        return local if self.keeps else _torch.tie(torch.zeros_like(local), local)


Step = Exchange | ByTorch | ToPartial


@planned
def plan_redistribution(source: Layout, target: Layout) -> tuple[Step, ...]:
    """Return the steps that redistribute a tensor.

    On gloo, DTensor all-gathers to change the sharded dimension, and it sends padding. So exchanges do what they can,
    and DTensor only the rest.
    """
    # torch makes Partial from replicated tensors only.
    gathered = source.placed(tuple(
        Replicate() if isinstance(p, Shard) and isinstance(q, Partial) else p
        for p, q in zip(source.placements, target.placements, strict=True)
    ))  # fmt: skip
    steps: list[Step] = []
    if gathered.placements != source.placements:
        steps, source = list(plan_redistribution(source, gathered)), gathered
    if source.mesh.get_coordinate() is not None:
        for advance in (_reshard_one_dim, _reshard_boxes, _broadcast):
            while (found := advance(source, target)) is not None:
                exchange, source = found
                steps += [] if exchange is None else [exchange]
    pairs = list(zip(source.placements, target.placements, strict=True))
    added = [m for m, (p, q) in enumerate(pairs) if isinstance(p, Replicate) and is_sum(q)]
    summed = source.placed(tuple(p if m in added else q for m, (p, q) in enumerate(pairs)))
    if source.placements != summed.placements:
        steps.append(ByTorch(source.spec, summed.spec))
    if added:
        here = source.mesh.get_coordinate()
        steps.append(ToPartial(here is not None and not any(here[m] for m in added)))
    return tuple(steps)


def _reshard_one_dim(source: Layout, target: Layout) -> tuple[Exchange, Layout] | None:
    """Reshard along one mesh dimension, from one tensor dimension to another, if that is possible directly.

    Other mesh dimensions may shard the two tensor dimensions further out, but not further in.
    """
    for mesh_dim, (p, q) in enumerate(zip(source.placements, target.placements, strict=True)):
        if type(p) is not Shard or type(q) is not Shard or p == q:
            continue
        if source.sharded_dims[p.dim][-1] != mesh_dim or source.sharded_dims.get(q.dim, (-1,))[-1] >= mesh_dim:
            continue
        placements = [*source.placements]
        placements[mesh_dim] = Replicate()
        sizes = [source.placed(tuple(placements)).own(dim).size for dim in (p.dim, q.dim)]
        placements[mesh_dim] = q
        line = rank_line(source.mesh, (mesh_dim,))
        before, after = (shards(size, line.sizes)[line.rank] for size in sizes)
        owned, needed = (before, Interval(0, sizes[1])), (Interval(0, sizes[0]), after)
        return Exchange(reshard(line, *sizes), (p.dim, q.dim), owned, needed), source.placed(tuple(placements))
    return None


def _reshard_boxes(source: Layout, target: Layout) -> tuple[Exchange, Layout] | None:
    """Reshard along all mesh dimensions that change, and those that share a tensor dimension, in one exchange."""
    pairs = list(zip(source.placements, target.placements, strict=True))
    moving = {m for m, (p, q) in enumerate(pairs) if type(p) is Shard and type(q) is Shard and p != q}
    if not moving:
        return None
    goal = source.placed(tuple(q if m in moving else p for m, (p, q) in enumerate(pairs)))
    while True:
        touched = {p.dim for layout in (source, goal) for m in moving if isinstance(p := layout.placements[m], Shard)}
        found = {m for layout in (source, goal) for dim in touched for m in layout.sharded_dims.get(dim, ())}
        if found <= moving:
            break
        moving |= found
    mesh_dims, dims = tuple(sorted(moving)), tuple(sorted(touched))
    line = rank_line(source.mesh, mesh_dims)
    owned, needed = (_grid(layout, dims, mesh_dims) for layout in (source, goal))
    (own,), (need,) = owned.boxes(line.rank), needed.boxes(line.rank)
    return Exchange(boxes(line, owned, needed), dims, own, need), goal


def _grid(layout: Layout, dims: tuple[int, ...], mesh_dims: tuple[int, ...]) -> Grid:
    over = tuple(tuple(map(mesh_dims.index, layout.sharded_dims.get(dim, ()))) for dim in dims)
    return Grid(tuple(map(layout.mesh.size, mesh_dims)), tuple(map(layout.shards, dims)), over)


def _broadcast(source: Layout, target: Layout) -> tuple[Exchange | None, Layout] | None:
    """Broadcast the only index of a sharded dimension of size 1 where the target is replicated.

    DTensor's all-gather would send padding.
    """
    for dim, mesh_dims in source.sharded_dims.items():
        if source.shape[dim] == 1 and all(isinstance(target.placements[m], Replicate) for m in mesh_dims):
            placements = tuple(Replicate() if m in mesh_dims else p for m, p in enumerate(source.placements))
            several = tuple(m for m in mesh_dims if source.mesh.size(m) > 1)
            exchange = None
            if several:
                schedule = broadcast_from_owner(line := rank_line(source.mesh, several), 1, 0)
                owned = shards(1, line.sizes)[line.rank]
                exchange = Exchange(schedule, (dim,), (owned,), (Interval(0, 1),))
            return exchange, source.placed(placements)
    return None
