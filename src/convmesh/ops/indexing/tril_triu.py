"""Triangles of matrices that are cut: each rank knows where its part begins."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ... import _torch
from ...sharding.layout import Layout, is_plain
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

TRIANGLE = Behaviour("all dimensions, pending sums", "nothing", "tensors without rows and columns")


@planned
def _plan(spec: _torch.Spec) -> tuple[Layout, int, bool]:
    """Where the tensor has to be, how far this rank's part is below the diagonal, and whether it has one."""
    layout = Layout.of(spec)
    source = layout.placed(tuple(p if is_plain(p) else Replicate() for p in layout.placements))
    rank = len(layout.shape)
    if rank < 2 or layout.mesh.get_coordinate() is None:
        return source, 0, False
    return source, source.own(rank - 2).start - source.own(rank - 1).start, True


@rule(aten.tril.default, aten.triu.default, behaviour=TRIANGLE)
def triangle(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, diagonal = _torch.arguments(operator, args, kwargs)
    (spec,) = check_placed(_torch.name_of(operator), (("input", input),))
    source, below, here = _plan(spec)
    local = move(input, source)
    if here or len(source.shape) < 2:  # which torch itself refuses
        local = operator(local, diagonal + below)
    return _torch.wrap(local.contiguous(), source.dense.spec)
