"""Sampling at the places that a grid gives, and grids of affine maps.

A grid may point anywhere, and only its numbers say where. So wherever the output is sharded in space, its input is
replicated there; batch and channels of the input may be sharded, and the grid along any dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour, composite, made_of_others
from ...sharding.sharding_table import P, R, Row, Shard
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import Like, table_rule

aten = torch.ops.aten

made_of_others(aten.grid_sampler.default)

STAYS = "batch, channels, space of the grid and so of the output, Partial(sum)"
GATHERED = "nothing; an input that is sharded in space is gathered, because a grid may point anywhere"
SAMPLING = Behaviour(STAYS, GATHERED)
AFFINE = Behaviour("batch, Partial(sum)", "nothing; matrices that are sharded are replicated")


def _check(input: Layout, grid: Layout) -> range:
    """The number of each spatial dimension."""
    spatial = input.ndim - 2
    fits = input.ndim == grid.ndim and grid.shape[-1] == spatial and grid.shape[0] == input.shape[0]
    if not fits or input.dtype != grid.dtype:
        raise Unfit("input and grid do not belong together",
                    f"give input (N, C, *space) and grid (N, *space, {spatial}) of one dtype")  # fmt: skip
    if min(input.shape[2:]) < 1:
        raise Unfit("the input has no spatial indices", "use sizes of at least 1")
    return range(spatial)


@table_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, behaviour=SAMPLING)
def grid_sample(input: Layout, grid: Layout, *_: object) -> Iterator[Row]:
    yield Row("replicated", (R, R), (R,))
    yield Row("batch", (Shard(0), Shard(0)), (Shard(0),))
    yield Row("channels", (Shard(1), R), (Shard(1),))
    for axis in _check(input, grid):
        yield Row("space", (R, Shard(1 + axis)), (Shard(2 + axis),))
    yield Row("sum", (P, R), (P,))


# A grid is mostly made of few numbers, and its gradient summed up: no use in gathering it for that.
@table_rule(
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, behaviour=SAMPLING,
    results=(Like("input"), Like("grid", or_sharded=True)),
)  # fmt: skip
def grid_sample_backward(grad_output: Layout, input: Layout, grid: Layout, *_: object) -> Iterator[Row]:
    spatial = _check(input, grid)
    if grad_output.shape != (*input.shape[:2], *grid.shape[1:-1]):
        raise Unfit("the gradient has not the output's shape", "give one of that shape")
    yield Row("replicated", (R, R, R), (R, R))
    yield Row("batch", (Shard(0), Shard(0), Shard(0)), (Shard(0), Shard(0)))
    yield Row("channels", (Shard(1), Shard(1), R), (Shard(1), P))
    for axis in spatial:
        yield Row("space", (Shard(2 + axis), R, Shard(1 + axis)), (P, Shard(1 + axis)))
    yield Row("sum", (P, R, R), (P, P))


def _own_maps(plan: TablePlan, *_: object) -> Callable[..., torch.Tensor]:
    return lambda theta, size, align_corners: plan.operator(theta, [theta.shape[0], *size[1:]], align_corners)


@table_rule(aten.affine_grid_generator.default, behaviour=AFFINE, local=_own_maps)
def affine_grid(theta: Layout, size: Sequence[int], align_corners: bool) -> Iterator[Row]:
    spatial = len(size) - 2
    if spatial not in (2, 3) or theta.shape != (size[0], spatial, spatial + 1):
        raise Unfit(f"maps do not fit an output of size {tuple(size)}",
                    "give size (N, C, *space) and theta (N, d, d + 1) for d = 2 or 3 spatial dimensions")  # fmt: skip
    yield Row("replicated", (R,), (R,))
    yield Row("batch", (Shard(0),), (Shard(0),))
    yield Row("sum", (P,), (P,))


@composite("affine_grid_generator_backward")
def affine_grid_backward(gradient: DTensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    """[N *space d] -> [N d d+1]: each number of a map is multiplied with a coordinate, at every place."""
    spatial = len(size) - 2
    same = torch.eye(spatial, spatial + 1, dtype=gradient.dtype, device=gradient.device)
    places = torch.affine_grid_generator(same[None], [1, 1, *size[2:]], align_corners)
    places = torch.cat([places, torch.ones_like(places[..., :1])], -1).unsqueeze(-2)
    mesh = gradient.device_mesh
    # torch's bmm of flattened space would gather what is sharded along it; a product and a sum do not.
    coordinates = DTensor.from_local(places, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return (gradient.unsqueeze(-1) * coordinates).sum(list(range(1, spatial + 1)))
