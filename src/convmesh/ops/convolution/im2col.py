"""`F.unfold` and `F.fold` on DTensors: windows of an image as columns, in the order of the rows they come from.

Columns are sharded by their own number, which may be in the middle of a row of windows. So each rank computes the rows
of windows that its columns lie in, from the image rows that these read; and folds what reads its image rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...comm import Halo, Held, Schedule, fetch, halo, rank_line
from ...geometry import HaloPlan, Interval, Reads, Shards, Window
from ...sharding.call import Call
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour

aten = torch.ops.aten
Pair = tuple[int, int]

UNFOLD = Behaviour("batch, channels, height, Partial(sum)", "halo of the input; all-to-all if the width is sharded")
FOLD = Behaviour("batch, channels, columns, Partial(sum)", "columns that overlap rows of other ranks")


@dataclass(frozen=True)
class Windows:
    kernel: Pair
    dilation: Pair
    padding: Pair
    stride: Pair

    @property
    def rows(self) -> Window:
        return Window(self.kernel[0], self.stride[0], self.padding[0], self.dilation[0])

    @property
    def local(self) -> tuple[Pair, Pair, Pair, Pair]:
        """The operator's arguments for rows that bring their padding with them."""
        return self.kernel, self.dilation, (0, self.padding[1]), self.stride


@dataclass(frozen=True)
class UnfoldPlan:
    source: Layout
    output: Layout
    schedule: Schedule | None  # None where rows and columns are not sharded: then the stock operator does it
    held: Interval  # what this rank owns of the rows or columns that it reads
    rows: Interval  # the rows of windows that this rank needs
    own: Interval  # what this rank produces: columns, or image rows
    columns: int  # in a row of windows


def _plan(
    layout: Layout, shape: tuple[int, ...], channels: int, per_row: int, parts: Callable[[Interval], Interval],
    needs: Callable[[Interval], Interval], readers: Callable[[Interval], Interval],
) -> UnfoldPlan:  # fmt: skip
    """`parts` are the rows of windows that belong to what a rank produces, and `needs` what these take of the input;
    `readers` is what is produced of some of the input."""
    lead = max(len(layout.shape), len(shape)) - 3  # 0 without a batch
    placements = _placements(layout, lead, channels)
    source = layout.placed(placements)
    output = Layout(layout.mesh, placements, shape, dense_stride(shape, torch.contiguous_format), layout.dtype)
    rows = lead + 1
    mesh_dims = tuple(m for m in source.sharded_dims.get(rows, ()) if layout.mesh.size(m) > 1)
    if not mesh_dims or layout.mesh.get_coordinate() is None:
        return UnfoldPlan(source, output, None, Interval(0, 0), Interval(0, 0), Interval(0, 0), per_row)
    sizes = tuple(layout.mesh.size(m) for m in mesh_dims)
    made, owned = Shards(shape[rows], sizes), Shards(layout.shape[rows], sizes)
    full = Interval(0, layout.shape[rows])
    halo_plan = HaloPlan(owned, Reads(made, lambda part: (needs(parts(part)) & full,), readers))
    line = rank_line(layout.mesh, mesh_dims)
    own = made[line.rank]
    schedule = halo(line, Halo(0, halo_plan, (full,)))
    return UnfoldPlan(source, output, schedule, owned[line.rank], parts(own), own, per_row)


def _placements(layout: Layout, lead: int, channels: int) -> tuple[Placement, ...]:
    """Channels stay sharded where every rank has all of them; they and the width are exchanged for the rows."""
    even = channels % prod(layout.mesh.size(m) for m in layout.sharded_dims.get(lead, ())) == 0
    return tuple(
        Shard(lead + 1) if isinstance(p, Shard) and (p.dim > lead + 1 or (p.dim == lead and not even)) else p
        for p in layout.without_partial("sum").placements
    )


def _fetch(plan: UnfoldPlan, x: torch.Tensor, needed: Interval) -> torch.Tensor:
    assert plan.schedule is not None
    rows = max(x.dim(), len(plan.output.shape)) - 2
    return fetch(plan.schedule, x, (rows,), (plan.held,), (needed,))


def _plan_unfold(layout: Layout, windows: Windows) -> UnfoldPlan:
    with _torch.meta_tensors(_torch.has_symbols(layout.shape)):  # torch's own checks, alike on all ranks
        full = torch.empty(layout.shape, device="meta")
        made = aten.im2col.default(full, windows.kernel, windows.dilation, windows.padding, windows.stride)
    shape = tuple(made.shape)
    per_row = shape[-1] // windows.rows.coarse_size(layout.shape[-2])

    def readers(rows: Interval) -> Interval:
        return _times(windows.rows.read_by(rows), per_row)

    return _plan(
        layout, shape, layout.shape[-3], per_row, lambda part: _rows(part, per_row), windows.rows.reads, readers
    )


def _rows(columns: Interval, per_row: int) -> Interval:
    return Interval(columns.start // per_row, -(-columns.stop // per_row)) if columns else Interval(0, 0)


def _times(rows: Interval, per_row: int) -> Interval:
    """The columns of rows of windows."""
    return Interval(rows.start * per_row, rows.stop * per_row)


@plan_rule(aten.im2col.default, behaviour=UNFOLD)
def unfold(operator: _torch.Operator, input: Layout, *numbers: Pair) -> Call:
    windows = Windows(*numbers)
    plan = _plan_unfold(input, windows)

    def run(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        if plan.schedule is None:
            return _stock(plan, x, lambda: operator(x, *numbers))
        rows, y = _fetch(plan, x, windows.rows.reads(plan.rows)), x.new_zeros(plan.output.local_shape)
        if plan.own and rows.numel():
            made = operator(rows, *windows.local)
            y = made.narrow(-1, plan.own.start - plan.rows.start * plan.columns, len(plan.own)).contiguous()
        return _torch.tie(y, x)

    return Call((plan.source,), plan.output, run)


def _stock(plan: UnfoldPlan, local: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    return run() if local.numel() else local.new_zeros(plan.output.local_shape)


def _plan_fold(layout: Layout, size: Pair, windows: Windows) -> UnfoldPlan:
    full = torch.empty(layout.shape, device="meta")
    numbers = (windows.kernel, windows.dilation, windows.padding, windows.stride)
    shape = tuple(aten.col2im.default(full, size, *numbers).shape)
    high = windows.rows.coarse_size(size[0])
    per_row = layout.shape[-1] // high

    def rows(part: Interval) -> Interval:
        return windows.rows.read_by(part) & Interval(0, high)

    def readers(columns: Interval) -> Interval:
        return windows.rows.reads(_rows(columns, per_row))

    return _plan(layout, shape, shape[-3], per_row, rows, lambda rows: _times(rows, per_row), readers)


@plan_rule(aten.col2im.default, behaviour=FOLD)
def fold(operator: _torch.Operator, input: Layout, size: Pair, *numbers: Pair) -> Call:
    windows = Windows(*numbers)
    plan = _plan_fold(input, size, windows)
    reach = windows.rows.reads(plan.rows)

    def run(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
        if plan.schedule is None:
            return _stock(plan, x, lambda: operator(x, *numbers))
        columns, y = _fetch(plan, x, _times(plan.rows, plan.columns)), x.new_zeros(plan.output.local_shape)
        if columns.numel() and plan.own:
            made = operator(columns, (len(reach), size[1]), *windows.local)
            y = Held.own(made, (made.dim() - 2,), (reach,)).read((plan.own,)).contiguous()
        return _torch.tie(y, x)

    return Call((plan.source,), plan.output, run)
