"""What a mask selects of a tensor: how much that is, only the values say.

Every rank counts what it selects, and all counts together tell each selected element its number. The results are
sharded in the order of these numbers, evenly: `x[mask]` of a sharded tensor is a sharded tensor, and so is the list of
true places. Into a selection values come the other way: each rank asks for those with its numbers. Compiled code cannot
know how many they are, and refuses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import all_gather_stacked, owners, rank_line, routed
from ...geometry import Shards
from ...sharding.call import Call, Reported
from ...sharding.errors import Unfit, refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.redistribute import check_placed, layouts_of, move
from ...sharding.registry import Behaviour
from .._core.cached_tensors import Numbers
from .._core.index_bounds import may_route

aten = torch.ops.aten
R = Replicate()

SELECTED = Behaviour(
    "all dimensions; what is selected is sharded evenly",
    "counts, and what changes its owner in the order of what is selected", "compiled code",
)  # fmt: skip


@dataclass(frozen=True)
class MaskPlan:
    """A tensor whose first dimensions are masked, of which at most one is sharded, over `mesh_dims`."""

    source: Layout
    mask: Layout
    dim: int
    mesh_dims: tuple[int, ...]


@planned
def plan_mask(operator: str, spec: _torch.Spec, mask_spec: _torch.Spec) -> MaskPlan:
    input, mask = layouts_of(operator, [("input", spec), ("mask", mask_spec)])
    if mask.shape != input.shape[: mask.ndim] or not mask.ndim:
        raise refuse(operator, "the mask has not the shape of the input's first dimensions",
                     (("input", input), ("mask", mask)), "give a mask of that shape")  # fmt: skip
    return _plan_mask(input, mask)


def _plan_mask(input: Layout, mask: Layout) -> MaskPlan:
    masked = mask.ndim
    given = [p if type(p) is Shard else R for p in input.placements]
    mesh_dims = tuple(m for m, p in enumerate(given) if isinstance(p, Shard) and p.dim < masked)
    dim = max({p.dim for m in mesh_dims if isinstance(p := given[m], Shard)} or {0}, key=lambda dim: input.shape[dim])
    placements: tuple[Placement, ...] = tuple(Shard(dim) if m in mesh_dims else p for m, p in enumerate(given))
    beside = tuple(p if m in mesh_dims else R for m, p in enumerate(placements))
    return MaskPlan(input.placed(placements), mask.placed(beside), dim, mesh_dims)


@dataclass(frozen=True)
class Selection:
    """What this rank selects: where, in the order of its elements, and the numbers of that among all."""

    mine: torch.Tensor  # of its elements, flat
    numbers: torch.Tensor
    count: int  # of all ranks


def select_masked(mask: torch.Tensor, plan: MaskPlan) -> Selection:
    mine = mask.reshape(-1).nonzero().squeeze(1)
    if not plan.mesh_dims:
        return Selection(mine, torch.arange(len(mine), device=mask.device), len(mine))
    mesh, rows = plan.source.mesh, prod(plan.mask.shape[: plan.dim])
    counts = mask.reshape(rows, mask.numel() // max(1, rows)).sum(1)
    # In the order of all elements, a row of this rank comes after those of the ranks before it in the same row.
    everyone = all_gather_stacked(counts, mesh, plan.mesh_dims).t().reshape(-1)
    along = rank_line(mesh, plan.mesh_dims)
    before = (everyone.cumsum(0) - everyone).view(rows, along.size)[:, along.rank]
    shift = before - (counts.cumsum(0) - counts)
    numbers = torch.arange(len(mine), device=mask.device) + shift.repeat_interleave(counts)
    return Selection(mine, numbers, int(everyone.sum()))


def _ranges(plan: MaskPlan, count: int) -> Shards:
    return Shards(count, tuple(plan.source.mesh.size(m) for m in plan.mesh_dims))


def gathered(rows: torch.Tensor, chosen: Selection, plan: MaskPlan) -> torch.Tensor:
    """This rank's part of all selected rows, of which `rows` are those that it has selected itself."""
    if not plan.mesh_dims:
        return rows
    ranges = _ranges(plan, chosen.count)
    route = routed(owners(chosen.numbers, ranges)[0], plan.source.mesh, plan.mesh_dims)
    numbers, came = route.send(chosen.numbers), route.send(rows)
    return torch.empty_like(came).index_copy_(0, numbers - ranges[route.line.rank].start, came)


def spread(values: torch.Tensor, chosen: Selection, plan: MaskPlan) -> torch.Tensor:
    """For what this rank has selected its rows, where every rank has its part of all of them."""
    if not plan.mesh_dims:
        return values
    owner, start, _ = owners(chosen.numbers, _ranges(plan, chosen.count))
    route = routed(owner, plan.source.mesh, plan.mesh_dims)
    return route.send_back(values[route.send(chosen.numbers - start)])


def output_of(plan: MaskPlan, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The layout of selected rows: sharded where masked dimensions were, and along those behind them as before."""
    behind = len(plan.mask.shape) - 1
    placements = tuple(
        Shard(0) if m in plan.mesh_dims else Shard(p.dim - behind) if isinstance(p, Shard) else p
        for m, p in enumerate(plan.source.placements)
    )
    return plan.source.new(shape, placements, dtype)


COMPILED = (
    "how much a mask selects is not known in compiled code",
    "use torch.where or a sum with the mask, or call it outside of torch.compile",
)


def refuse_compiled(operator: str, tensors: Sequence[tuple[str, object]]) -> None:
    if _torch.tracing():
        raise refuse(operator, COMPILED[0], tensors, COMPILED[1])


def begin_mask(operator: str, input: Any, mask: Any) -> MaskPlan:
    refuse_compiled(operator, (("input", input),))
    specs = check_placed(operator, (("input", input), ("mask", mask)))
    return plan_mask(operator, *specs)


def index_masked(input: DTensor, mask: DTensor) -> DTensor:
    """`input[mask]`"""
    plan = begin_mask("index with a mask", input, mask)
    remember(input)
    x, truth = move(input, plan.source), move(mask, plan.mask)
    if not plan.source.present:
        return _torch.wrap(x.new_empty(0), output_of(plan, (0, *input.shape[mask.dim() :]), input.dtype).spec)
    chosen = select_masked(truth, plan)
    rows = gathered(x.reshape(truth.numel(), *x.shape[mask.dim() :])[chosen.mine], chosen, plan)
    return _torch.wrap(rows, output_of(plan, (chosen.count, *input.shape[mask.dim() :]), input.dtype).spec)


def put_masked(full: DTensor, mask: DTensor, values: DTensor, adds: bool) -> tuple[torch.Tensor, Layout]:
    """The local tensor of `full` with `values` where the mask is true, and its layout."""
    plan = begin_mask("index_put with a mask", full, mask)
    x, truth = move(full, plan.source).clone(memory_format=torch.contiguous_format), move(mask, plan.mask)
    if not plan.source.present:
        return x, plan.source
    chosen = select_masked(truth, plan)
    rows = x.view(truth.numel(), *x.shape[mask.dim() :])
    wanted = output_of(plan, (chosen.count, *full.shape[mask.dim() :]), full.dtype)
    if tuple(values.shape) != wanted.shape:
        raise refuse("index_put with a mask", f"it selects {wanted.shape}", (("values", values),),
                     "give as many values as are selected")  # fmt: skip
    rows.index_put_((chosen.mine,), spread(move(values, wanted), chosen, plan), accumulate=adds)
    return x, plan.source


def _alike(input: Any, mask: Any) -> tuple[DTensor, DTensor]:
    """Both in the shape that they have together, and that of a row if they are numbers."""
    shape = list(torch.broadcast_shapes(input.shape, mask.shape)) or [1]
    one, other = (aten.expand.default(t, shape) if list(t.shape) != shape else t for t in (input, mask))
    return one, other


@plan_rule(aten.masked_select.default, behaviour=SELECTED)
def masked_select(operator: _torch.Operator, *_: Any) -> Made:
    return lambda input, mask: index_masked(*_alike(input, mask))


@plan_rule(aten.masked_scatter.default, behaviour=SELECTED)
def masked_scatter(operator: _torch.Operator, *_: Any) -> Made:
    """The gradient of `masked_select`. Its values are as many as the mask selects, or more."""
    return _masked_scatter


def _masked_scatter(full: Any, mask: Any, values: Any) -> Any:
    number = not full.dim() and not mask.dim()
    full, mask = _alike(full, mask)
    plan = begin_mask("masked_scatter", full, mask)
    count = select_masked(move(mask, plan.mask), plan).count if plan.source.present else 0
    flat = aten.view.default(aten.clone.default(values, memory_format=torch.contiguous_format), [values.numel()])
    local, layout = put_masked(full, mask, aten.slice.Tensor(flat, 0, 0, count), False)
    result = _torch.wrap(local, layout.dense.spec)
    return aten.select.int(result, 0, 0) if number else result


@plan_rule(aten.masked_scatter_backward.default, behaviour=SELECTED)
def masked_scatter_backward(operator: _torch.Operator, gradient: Layout, mask: Layout, sizes: tuple[int, ...]) -> Made:
    """What was taken from the first values, and nothing for the others."""

    def made(gradient: DTensor, mask: DTensor, sizes: Sequence[int]) -> Any:
        taken = index_masked(*_alike(gradient, mask))
        padded = aten.constant_pad_nd.default(taken, [0, prod(sizes) - taken.shape[0]])
        return aten.view.default(padded, list(sizes))

    return made


@plan_rule(aten.nonzero.default, behaviour=SELECTED, asks=may_route, foreign=True)
def nonzero(operator: _torch.Operator, input: Layout, known: bool) -> Call | None:
    if not input.ndim:
        return None
    if not known:
        raise Unfit(*COMPILED)
    plan = _plan_mask(input, input)
    output = output_of(plan, (0, input.ndim), torch.int64)
    starts = Numbers([plan.mask.own(dim).start for dim in range(input.ndim)] if output.present else ())

    def run(local: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        chosen = select_masked(local != 0, plan)
        rows = gathered(local.nonzero() + starts.on(local.device), chosen, plan)
        # One device finds them dimension by dimension.
        return rows, replace(output, shape=(chosen.count, input.ndim), stride=(1, max(1, chosen.count)))

    return Call((plan.mask,), Reported(output), run)
