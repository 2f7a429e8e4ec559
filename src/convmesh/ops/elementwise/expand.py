"""Repeating size-1 dimensions. (The reductions sum a gradient back over them.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...sharding.call import copy_of
from ...sharding.errors import refuse
from ...sharding.gradient_placements import Placements, placements_of
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import move
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

EXPAND = Behaviour(
    "all dimensions but the expanded ones; in backward, a gradient is placed like its tensor",
    "nothing; all-reduce of a Partial input before it is expanded; an expanded dimension that is sharded is replicated",
)  # fmt: skip


@dataclass(frozen=True)
class ExpandPlan:
    """The layout that the input is redistributed to, and that of the result."""

    source: Layout
    output: Layout


@planned
def plan_expand(spec: _torch.Spec, sizes: tuple[int, ...], preferred: Placements | None) -> ExpandPlan | None:
    """Plan an expand; None where only torch's DTensor knows what to do.

    Of the `preferred` placements, those that cost nothing are taken: any rank can make any shard of what is repeated.
    """
    layout = Layout.of(spec)
    new = len(sizes) - len(layout.shape)
    if not _torch.plain_order(spec) or any(type(p) not in (Replicate, Shard, Partial) for p in layout.placements):
        return None
    fitting = new >= 0 and all(
        wanted in (-1, size) or (size == 1 and wanted >= 0)
        for size, wanted in zip(layout.shape, sizes[new:], strict=True)
    )
    if not fitting or any(size < 0 for size in sizes[: max(new, 0)]):
        raise refuse("expand", f"cannot become {list(sizes)}", [("input", layout)],
                     "give -1 or the size itself for each dimension that is not of size 1")  # fmt: skip
    shape = (*sizes[:new], *(s if w == -1 else w for s, w in zip(layout.shape, sizes[new:], strict=True)))
    repeated = {dim for dim, size in enumerate(layout.shape) if size != shape[dim + new]}
    grows = bool(repeated) or any(size != 1 for size in shape[:new])

    def kept(placement: Placement) -> Placement:
        if isinstance(placement, Partial) and grows:
            return Replicate()  # reducing the repeated tensor later would send that many times more
        return Replicate() if isinstance(placement, Shard) and placement.dim in repeated else placement

    placements = tuple(map(kept, layout.placements))
    grown = {*range(new), *(dim + new for dim in repeated)}
    if preferred is not None and grows:  # what is replicated is narrowed to the rank's shard; a sum is reduce-scattered
        placements = tuple(
            Shard(w.dim - new) if isinstance(p, Replicate) and type(w) is Shard and w.dim not in grown else p
            for p, w in zip(placements, preferred, strict=True)
        )
    source = layout.placed(placements)
    stride = (*(0,) * new, *(0 if dim in repeated else step for dim, step in enumerate(layout.stride)))
    outputs = tuple(Shard(p.dim + new) if isinstance(p, Shard) else p for p in placements)
    if preferred is not None:
        outputs = tuple(
            w if type(w) is Shard and w.dim in grown and isinstance(p, Replicate) else p
            for p, w in zip(outputs, preferred, strict=True)
        )
    return ExpandPlan(source, Layout(layout.mesh, outputs, shape, stride, layout.dtype))


@rule(aten.expand.default, behaviour=EXPAND)
def expand(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, sizes, _ = _torch.arguments(operator, args, kwargs)
    spec, shape = _torch.spec_of(input), tuple(map(_torch.known, sizes))
    # The gradient of a reduction is a few values expanded to its input's shape. It gets the input's placements, so
    # it is never replicated.
    plan = plan_expand(spec, shape, placements_of(spec.mesh, shape))
    if plan is None:
        return _torch.stock(operator, args, kwargs)
    if plan.source.placements == input.placements:
        return _torch.as_view(operator, args, kwargs, _repeated(_torch.local_of(input), plan))
    moved = _torch.wrap(move(input, plan.source), plan.source.spec)
    if not _torch.in_backward():  # nobody writes into a gradient that autograd has just made a larger one of
        copy_of(moved, input, (lambda full: _torch.wrap(move(full, plan.source), plan.source.spec), None))
    return _repeated(_torch.local_of(moved), plan)


def _repeated(local: torch.Tensor, plan: ExpandPlan) -> DTensor:
    return _torch.wrap(local.expand(plan.output.local_shape) if plan.output.present else local, plan.output.spec)
