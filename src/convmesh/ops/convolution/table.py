"""The sharding table of convolution: which placements go in, and which come out, along one mesh dimension."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ...geometry import Convolution, shards
from ...sharding.sharding_table import Assignment, Row

R, P = Replicate(), Partial()


@lru_cache(maxsize=256)
def forward_rows(spatial: int, transposed: bool, groups: int) -> tuple[Row, ...]:
    """(input, weight, bias) -> (output,). Where the output is Partial(sum), one rank only adds the bias."""
    out, channels_in = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))
    rows = [
        Row("replicated", (R, R, R), (R,)),
        Row("batch", (Shard(0), R, R), (Shard(0),)),
        *[Row("space", (Shard(2 + axis), R, R), (Shard(2 + axis),)) for axis in range(spatial)],
        Row("groups", (Shard(1), Shard(0), Shard(0)), (Shard(1),)),
        Row("sum of inputs", (P, R, R), (P,)),
        Row("sum of weights", (R, P, R), (P,)),
    ]
    if groups == 1:
        rows += [
            Row("output channels", (R, out, Shard(0)), (Shard(1),)),
            Row("input channels", (Shard(1), channels_in, R), (P,)),
        ]
    return tuple(rows)


@lru_cache(maxsize=256)
def backward_rows(spatial: int, transposed: bool, groups: int) -> tuple[Row, ...]:
    """(output gradient, input, weight) -> (input gradient, weight gradient, bias gradient)"""
    out, channels_in = (Shard(1), Shard(0)) if transposed else (Shard(0), Shard(1))
    spaces = [Shard(2 + axis) for axis in range(spatial)]
    rows = [
        Row("replicated", (R, R, R), (R, R, R)),
        Row("batch", (Shard(0), Shard(0), R), (Shard(0), P, P)),
        *[Row("space", (space, space, R), (space, P, P)) for space in spaces],
        Row("groups", (Shard(1), Shard(1), Shard(0)), (Shard(1), Shard(0), Shard(0))),
        Row("sum of gradients", (P, R, R), (P, P, P)),
        Row("sum of inputs", (R, P, R), (R, P, R)),
        Row("sum of weights", (R, R, P), (P, R, R)),
    ]
    if groups == 1:
        rows += [
            Row("output channels", (Shard(1), R, out), (P, out, Shard(0))),
            Row("input channels", (R, Shard(1), channels_in), (Shard(1), channels_in, R)),
        ]
    return tuple(rows)


def local_groups(
    assignment: Assignment, conv: Convolution, mesh: DeviceMesh, weight_shape: Sequence[int]
) -> list[int] | None:
    """How many groups each rank along the 'groups' rows has; None if a rank would have parts of a group.

    Input channels, output channels and weights are sharded by their own sizes; all have to be split between groups.
    """
    mesh_dims = [mesh_dim for mesh_dim, row in enumerate(assignment) if row.name == "groups"]
    if not mesh_dims:
        return [conv.groups]
    mesh_sizes = tuple(mesh.size(mesh_dim) for mesh_dim in mesh_dims)
    counts: list[list[int]] = []
    for channels in (conv.input_channels(weight_shape), conv.output_channels(weight_shape)):
        per_group = channels // conv.groups
        parts = shards(channels, mesh_sizes)
        if per_group == 0 or any(size % per_group for size, _ in parts.runs):
            return None
        counts.append([len(part) // per_group for part in parts])
    return counts[0] if counts[0] == counts[1] else None
