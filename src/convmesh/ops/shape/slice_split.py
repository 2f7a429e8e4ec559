"""Parts of a dimension: slice, split, unbind, and the gradient of a slice.

Along a dimension that is not sharded these stay torch's own views. Along a sharded one they make new tensors, sharded
by their own size; what is written into them is put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from ... import _torch
from ...geometry import index_map
from ...sharding.call import Call
from ...sharding.copy_notes import PutBack, Take
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.local_views import local_views
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.registry import Behaviour, made_of_others
from .._core.index_copy_plan import copy_plan

aten = torch.ops.aten

SLICE = Behaviour(
    "all dimensions, Partial(sum)", "nothing; elements that change owner if the sliced dimension is sharded"
)


# These reach DTensor in inference mode only; DTensor would narrow every rank's own shard.
made_of_others(
    aten.narrow.default, aten.narrow.Tensor, aten.chunk.default, aten.tensor_split.sections, aten.tensor_split.indices,
    aten.split.sizes, aten.hsplit.int, aten.vsplit.int, aten.dsplit.int,
)  # fmt: skip

SPLIT = Behaviour(
    "all dimensions, Partial(sum)", "nothing; elements of each part that change owner if the dimension is sharded"
)
SLICE_BACKWARD = Behaviour(SLICE.stays, "nothing; elements that change owner if the dimension is sharded")


def bounds(size: int, start: int | None, stop: int | None, step: int) -> tuple[int, int]:
    """Return how many indices a slice has, and the first of them."""
    first, last = 0 if start is None else _clamped(start, size), size if stop is None else _clamped(stop, size)
    return max(0, -((first - last) // step)), first


def _clamped(at: int, size: int) -> int:
    """Clamp the start or end of a slice to `[0, size]`; negative values count from the end."""
    return min(at, size) if at >= 0 else max(at + size, 0)


def _local_slice(
    operator: _torch.Operator, input: Layout, dim: int = 0, start: int | None = None, stop: int | None = None,
    step: int = 1,
) -> Layout | None:  # fmt: skip
    """The layout of a part of a dimension that is not sharded; None of others, and where torch complains."""
    dim %= max(1, input.ndim)
    if not input.ndim or step < 1 or dim in input.sharded_dims:
        return None
    count, _ = bounds(input.shape[dim], start, stop, step)
    shape = (*input.shape[:dim], count, *input.shape[dim + 1 :])
    stride = (*input.stride[:dim], input.stride[dim] * step, *input.stride[dim + 1 :])
    return replace(input, shape=shape, stride=stride)


@plan_rule(aten.slice.Tensor, behaviour=SLICE, foreign=True, quick=local_views(_local_slice))
def slice_(
    operator: _torch.Operator, input: Layout, dim: int, start: int | None, stop: int | None, step: int
) -> Call | None:
    if not input.ndim or step < 1:
        return None  # torch raises
    output = _local_slice(operator, input, dim, start, stop, step)
    if output is not None:
        return Call((input,), output, operator, view=True)
    dim %= input.ndim
    size = input.shape[dim]
    count, first = bounds(size, start, stop, step)
    if (count, first, step) == (size, 0, 1):
        return Call((input,), input, lambda x, *_: aten.alias.default(x), view=True)
    where = (dim, start, stop, step)
    return copy_plan(input, {dim: index_map.strided(count, first, step)}).call(
        lambda x, fill: operator(x, *where).clone(), copies=[(
            lambda full: operator(full, *where),
            lambda full, part: aten.slice_scatter.default(full, part, *where),
        )],
    )  # fmt: skip


@plan_rule(aten.slice_backward.default, behaviour=SLICE_BACKWARD)
def slice_backward(
    operator: _torch.Operator, gradient: Layout, sizes: tuple[int, ...], dim: int, start: int, stop: int, step: int
) -> Call:
    dim %= len(sizes)
    count, first = bounds(sizes[dim], start, stop, step)
    if count != gradient.shape[dim]:
        raise Unfit(
            f"the slice has {count} indices, its gradient {gradient.shape[dim]}", "give a gradient of the slice's shape"
        )

    def local_op(local: torch.Tensor, fill: object) -> torch.Tensor:
        shape = [sizes[dim] if other == dim else size for other, size in enumerate(local.shape)]
        result: torch.Tensor = operator(local, shape, dim, start, stop, step)
        return result

    return copy_plan(gradient, {dim: index_map.slice_backward(sizes[dim], count, first, step)}).call(local_op)


@plan_rule(aten.split.Tensor, aten.split_with_sizes.default, behaviour=SPLIT, foreign=True)
def split(operator: _torch.Operator, input: Layout, sizes: int | Sequence[int], dim: int) -> Made | None:
    dim %= max(1, input.ndim)
    if dim not in input.sharded_dims and input.ndim and input.shape[dim]:  # DTensor does not split an empty dimension
        return None
    parts = _part_sizes(input.shape[dim], sizes)
    ends = list(accumulate(parts))
    where = [(dim, end - size, end) for end, size in zip(ends, parts, strict=True)]
    return lambda input, *_: [aten.slice.Tensor(input, *one) for one in where]


def _part_sizes(total: int, sizes: int | Sequence[int]) -> list[int]:
    """Return the sizes of the parts. For a symbolic dimension the compiled code holds only for this number of parts."""
    if isinstance(sizes, Sequence):
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise Unfit(f"the sizes {list(sizes)} do not add up to {total}", "give sizes that do")
        return list(sizes)
    if sizes < 0 or (sizes == 0 and total):
        raise Unfit(f"a dimension of {total} indices has no parts of {sizes}", "give a positive size")
    if not total:
        return [0]
    before = int(-(-total // sizes)) - 1
    return [*[sizes] * before, total - sizes * before]


@plan_rule(
    aten.unbind.int, foreign=True,
    behaviour=Behaviour("all other dimensions", "nothing; if this one is sharded, an all-to-all to another one"),
)  # fmt: skip
def unbind(operator: _torch.Operator, input: Layout, dim: int) -> Call | None:
    """All indices of a dimension together are the full tensor, so another dimension is sharded instead."""
    dim %= max(1, input.ndim)
    if dim not in input.sharded_dims:
        return None
    source, size = input.without_partial("sum").sharded_elsewhere(dim), input.shape[dim]

    def run(x: torch.Tensor, _: int) -> list[torch.Tensor]:
        """Unbind into tensors with storage of their own: copies are noted per storage."""
        return [one.clone(memory_format=torch.contiguous_format) for one in x.unbind(dim)]

    return Call((source,), [source.without((dim,))] * size, run, copies=[index_copy(dim, at) for at in range(size)])


def index_copy(dim: int, index: int) -> tuple[Take, PutBack]:
    """Return the functions that copy an index out of a tensor, and put it back."""
    return (
        lambda full: aten.select.int(full, dim, index),
        lambda full, part: aten.select_scatter.default(full, part, dim, index),
    )
