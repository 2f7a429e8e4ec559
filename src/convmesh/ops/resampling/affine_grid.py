"""Grids of affine maps: sharded over the batch as the maps are, or replicated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...sharding.errors import refuse
from ...sharding.layout import Layout, dense_stride, is_sum
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, composite, rule
from ..pooling.window import name_of

aten = torch.ops.aten


@rule(
    aten.affine_grid_generator.default,
    behaviour=Behaviour("batch, Partial(sum)", "nothing; maps that are sharded otherwise are replicated"),
)
def affine_grid(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    theta, size, align_corners = _torch.arguments(operator, args, kwargs)
    check_placed(name_of(operator), (("theta", theta),))
    moved, grid = _plan(name_of(operator), _torch.spec_of(theta), tuple(map(int, size)))
    maps = move(theta, moved)
    if theta.device_mesh.get_coordinate() is None:
        return _torch.wrap(maps.new_empty(0), grid.spec)
    shape = grid.local_shape
    if not prod(shape):
        return _torch.wrap(maps.new_empty(shape), grid.spec)
    return _torch.wrap(operator(maps, [shape[0], *size[1:]], align_corners).contiguous(), grid.spec)


@planned
def _plan(operator: str, theta_spec: _torch.Spec, size: tuple[int, ...]) -> tuple[Layout, Layout]:
    theta = Layout.of(theta_spec)
    spatial = len(size) - 2
    if spatial not in (2, 3) or theta.shape != (size[0], spatial, spatial + 1):
        raise refuse(operator, f"maps do not fit an output of size {size}", (("theta", theta),),
                     "give size (N, C, *space) and theta (N, d, d + 1) for d = 2 or 3 spatial dimensions")  # fmt: skip
    placements = tuple(p if p == Shard(0) or is_sum(p) else Replicate() for p in theta.placements)
    shape = (size[0], *size[2:], spatial)
    stride = dense_stride(shape, torch.contiguous_format)
    return theta.placed(placements), Layout(theta.mesh, placements, shape, stride, theta.dtype)


@composite("affine_grid_generator_backward")
def affine_grid_backward(gradient: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """[N *space d] -> [N d d+1]: each number of a map is multiplied with a coordinate, at every place."""
    if not isinstance(gradient, DTensor):
        operator = aten.affine_grid_generator_backward.default
        result: torch.Tensor = _torch.composite(operator, (gradient, size, align_corners), {})
        return result
    spatial = len(size) - 2
    same = torch.eye(spatial, spatial + 1, dtype=gradient.dtype, device=gradient.device)
    places = torch.affine_grid_generator(same[None], [1, 1, *size[2:]], align_corners)
    places = torch.cat([places, torch.ones_like(places[..., :1])], -1).unsqueeze(-2)
    mesh = gradient.device_mesh
    # torch's bmm of flattened space would gather what is sharded along it; a product and a sum do not.
    coordinates = DTensor.from_local(places, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return (gradient.unsqueeze(-1) * coordinates).sum(list(range(1, spatial + 1)))
