"""Selecting elements of a tensor with a mask, where the size of the result depends on values.

Every rank counts what it selects, and the counts of all ranks give each selected element its position. The results are
sharded evenly by position: `x[mask]` of a sharded tensor is a sharded tensor, and so is the result of `nonzero`.
Writing into a selection goes the other way: each rank fetches the values for its positions. Compiled code cannot know
how many elements are selected, so it is refused.
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
from ...comm import all_gather_stacked, owners, rank_line, route_rows
from ...geometry import Shards
from ...sharding.call import Call, Reported
from ...sharding.errors import Unfit, refuse
from ...sharding.gradient_placements import remember
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.redistribute import check_placed, layouts_of, move
from ...sharding.registry import Behaviour
from .._core.cached_tensors import Constant
from .._core.index_bounds import can_route

aten = torch.ops.aten
R = Replicate()

SELECTED = Behaviour(
    "all dimensions; the selected elements are sharded evenly",
    "all-gather of the ranks' counts, and selected elements that change owner", "compiled code",
)  # fmt: skip


@dataclass(frozen=True)
class MaskPlan:
    """A tensor whose first dimensions are masked. At most one of these, `dim`, is sharded, over `mesh_dims`."""

    source: Layout
    mask: Layout
    dim: int
    mesh_dims: tuple[int, ...]


@planned
def plan_mask(operator: str, spec: _torch.Spec, mask_spec: _torch.Spec) -> MaskPlan:
    """Check the mask's shape, and plan by specs (cached)."""
    input, mask = layouts_of(operator, [("input", spec), ("mask", mask_spec)])
    if mask.shape != input.shape[: mask.ndim] or not mask.ndim:
        raise refuse(operator, "the mask does not have the shape of the input's first dimensions",
                     (("input", input), ("mask", mask)), "give a mask of that shape")  # fmt: skip
    return _plan_mask(input, mask)


def _plan_mask(input: Layout, mask: Layout) -> MaskPlan:
    """Plan so that at most one masked dimension is sharded: the longest of those that are."""
    masked = mask.ndim
    given = [p if type(p) is Shard else R for p in input.placements]
    mesh_dims = tuple(m for m, p in enumerate(given) if isinstance(p, Shard) and p.dim < masked)
    dim = max({p.dim for m in mesh_dims if isinstance(p := given[m], Shard)} or {0}, key=lambda dim: input.shape[dim])
    placements: tuple[Placement, ...] = tuple(Shard(dim) if m in mesh_dims else p for m, p in enumerate(given))
    mask_placements = tuple(p if m in mesh_dims else R for m, p in enumerate(placements))
    return MaskPlan(input.placed(placements), mask.placed(mask_placements), dim, mesh_dims)


@dataclass(frozen=True)
class Selection:
    """The elements that this rank selects, and their positions among those that all ranks select."""

    local_index: torch.Tensor  # flat, into the mask's local tensor, ascending
    positions: torch.Tensor
    count: int  # how many elements all ranks select


def select_masked(mask: torch.Tensor, plan: MaskPlan) -> Selection:
    """Number what this rank selects; the ranks that share the mask all-gather their counts."""
    index = mask.reshape(-1).nonzero().squeeze(1)
    if not plan.mesh_dims:
        return Selection(index, torch.arange(len(index), device=mask.device), len(index))
    mesh, rows = plan.source.mesh, prod(plan.mask.shape[: plan.dim])
    counts = mask.reshape(rows, mask.numel() // max(1, rows)).sum(1)
    # In the order of the full tensor, this rank's part of a row comes after the parts of the ranks before it.
    all_counts = all_gather_stacked(counts, mesh, plan.mesh_dims).t().reshape(-1)
    line = rank_line(mesh, plan.mesh_dims)
    before = (all_counts.cumsum(0) - all_counts).view(rows, line.size)[:, line.rank]
    shift = before - (counts.cumsum(0) - counts)
    positions = torch.arange(len(index), device=mask.device) + shift.repeat_interleave(counts)
    return Selection(index, positions, int(all_counts.sum()))


def _even_shards(plan: MaskPlan, count: int) -> Shards:
    """The even shards of `count` selected rows."""
    return Shards(count, tuple(plan.source.mesh.size(m) for m in plan.mesh_dims))


def gather_selected(rows: torch.Tensor, selection: Selection, plan: MaskPlan) -> torch.Tensor:
    """Return this rank's shard of all selected rows; `rows` are those that it has selected itself. An all-to-all."""
    if not plan.mesh_dims:
        return rows
    ranges = _even_shards(plan, selection.count)
    route = route_rows(owners(selection.positions, ranges)[0], plan.source.mesh, plan.mesh_dims)
    positions, received = route.send(selection.positions), route.send(rows)
    return torch.empty_like(received).index_copy_(0, positions - ranges[route.line.rank].start, received)


def scatter_selected(values: torch.Tensor, selection: Selection, plan: MaskPlan) -> torch.Tensor:
    """Return the values for what this rank has selected, from its shard of all of them: inverts `gather_selected`."""
    if not plan.mesh_dims:
        return values
    owner, start, _ = owners(selection.positions, _even_shards(plan, selection.count))
    route = route_rows(owner, plan.source.mesh, plan.mesh_dims)
    return route.send_back(values[route.send(selection.positions - start)])


def selected_layout(plan: MaskPlan, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The layout of selected rows: sharded where masked dimensions were; later dimensions keep their placements."""
    behind = len(plan.mask.shape) - 1
    placements = tuple(
        Shard(0) if m in plan.mesh_dims else Shard(p.dim - behind) if isinstance(p, Shard) else p
        for m, p in enumerate(plan.source.placements)
    )
    return plan.source.new(shape, placements, dtype)


UNKNOWN_COUNT = (
    "how much a mask selects is not known in compiled code",
    "use torch.where or a sum with the mask, or call it outside of torch.compile",
)


def refuse_compiled(operator: str, tensors: Sequence[tuple[str, object]]) -> None:
    if _torch.tracing():
        raise refuse(operator, UNKNOWN_COUNT[0], tensors, UNKNOWN_COUNT[1])


def check_and_plan_mask(operator: str, input: Any, mask: Any) -> MaskPlan:
    """Return the plan of an operator with a mask; refuse compiled code."""
    refuse_compiled(operator, (("input", input),))
    specs = check_placed(operator, (("input", input), ("mask", mask)))
    return plan_mask(operator, *specs)


def index_masked(input: DTensor, mask: DTensor) -> DTensor:
    """Return `input[mask]`."""
    plan = check_and_plan_mask("index with a mask", input, mask)
    remember(input)
    x, local_mask = move(input, plan.source), move(mask, plan.mask)
    if not plan.source.present:
        return _torch.wrap(x.new_empty(0), selected_layout(plan, (0, *input.shape[mask.dim() :]), input.dtype).spec)
    selection = select_masked(local_mask, plan)
    own_rows = x.reshape(local_mask.numel(), *x.shape[mask.dim() :])[selection.local_index]
    rows = gather_selected(own_rows, selection, plan)
    return _torch.wrap(rows, selected_layout(plan, (selection.count, *input.shape[mask.dim() :]), input.dtype).spec)


def put_masked(full: DTensor, mask: DTensor, values: DTensor, adds: bool) -> tuple[torch.Tensor, Layout]:
    """Return the local tensor of `full` with `values` written (or added) where the mask is true, and its layout."""
    plan = check_and_plan_mask("index_put with a mask", full, mask)
    x, local_mask = move(full, plan.source).clone(memory_format=torch.contiguous_format), move(mask, plan.mask)
    if not plan.source.present:
        return x, plan.source
    selection = select_masked(local_mask, plan)
    rows = x.view(local_mask.numel(), *x.shape[mask.dim() :])
    wanted = selected_layout(plan, (selection.count, *full.shape[mask.dim() :]), full.dtype)
    if tuple(values.shape) != wanted.shape:
        raise refuse("index_put with a mask", f"the mask selects {wanted.shape}", (("values", values),),
                     "give as many values as are selected")  # fmt: skip
    rows.index_put_((selection.local_index,), scatter_selected(move(values, wanted), selection, plan), accumulate=adds)
    return x, plan.source


def _broadcast_together(input: Any, mask: Any) -> tuple[DTensor, DTensor]:
    """Broadcast both to their common shape; 0-d tensors become 1-d."""
    shape = list(torch.broadcast_shapes(input.shape, mask.shape)) or [1]
    input, mask = (aten.expand.default(t, shape) if list(t.shape) != shape else t for t in (input, mask))
    return input, mask


@plan_rule(aten.masked_select.default, behaviour=SELECTED)
def masked_select(operator: _torch.Operator, *_: Any) -> Made:
    return lambda input, mask: index_masked(*_broadcast_together(input, mask))


@plan_rule(aten.masked_scatter.default, behaviour=SELECTED)
def masked_scatter(operator: _torch.Operator, *_: Any) -> Made:
    """The gradient of `masked_select`. It has as many values as the mask selects, or more."""
    return _masked_scatter


def _masked_scatter(full: Any, mask: Any, values: Any) -> Any:
    is_0d = not full.dim() and not mask.dim()
    full, mask = _broadcast_together(full, mask)
    plan = check_and_plan_mask("masked_scatter", full, mask)
    count = select_masked(move(mask, plan.mask), plan).count if plan.source.present else 0
    flat = aten.view.default(aten.clone.default(values, memory_format=torch.contiguous_format), [values.numel()])
    local, layout = put_masked(full, mask, aten.slice.Tensor(flat, 0, 0, count), False)
    result = _torch.wrap(local, layout.dense.spec)
    return aten.select.int(result, 0, 0) if is_0d else result


@plan_rule(aten.masked_scatter_backward.default, behaviour=SELECTED)
def masked_scatter_backward(operator: _torch.Operator, gradient: Layout, mask: Layout, sizes: tuple[int, ...]) -> Made:
    """Return the gradient of the values: those that were used get theirs, the rest zero."""

    def run(gradient: DTensor, mask: DTensor, sizes: Sequence[int]) -> Any:
        selected = index_masked(*_broadcast_together(gradient, mask))
        padded = aten.constant_pad_nd.default(selected, [0, prod(sizes) - selected.shape[0]])
        return aten.view.default(padded, list(sizes))

    return run


@plan_rule(aten.nonzero.default, behaviour=SELECTED, asks=can_route, foreign=True)
def nonzero(operator: _torch.Operator, input: Layout, known: bool) -> Call | None:
    if not input.ndim:
        return None
    if not known:
        raise Unfit(*UNKNOWN_COUNT)
    plan = _plan_mask(input, input)
    output = selected_layout(plan, (0, input.ndim), torch.int64)
    starts = Constant([plan.mask.own(dim).start for dim in range(input.ndim)] if output.present else ())

    def run(local: torch.Tensor) -> tuple[torch.Tensor, Layout]:
        selection = select_masked(local != 0, plan)
        rows = gather_selected(local.nonzero() + starts.on(local.device), selection, plan)
        # One device returns a transposed tensor: contiguous along each input dimension.
        return rows, replace(output, shape=(selection.count, input.ndim), stride=(1, max(1, selection.count)))

    return Call((plan.mask,), Reported(output), run)
