"""Parts of a dimension on DTensors: slice, split, select, and putting such parts back.

Along a dimension that is not sharded all of these stay torch's own views. Along one that is sharded they make new
tensors, which have the layout of their own size; what is written into them is put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...geometry import index_map
from ...sharding.call import Call, copy_of
from ...sharding.errors import Unfit, refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.plan_rule import plan_rule
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from .._core.index_copy_plan import copy_plan

aten = torch.ops.aten

SLICE = Behaviour("all dimensions, Partial sums", "what changes its owner along the sliced dimension")


# These reach DTensor in inference mode only; DTensor would narrow every rank's own part.
made_of_others(
    aten.narrow.default, aten.narrow.Tensor, aten.chunk.default, aten.tensor_split.sections, aten.tensor_split.indices,
    aten.split.sizes, aten.hsplit.int, aten.vsplit.int, aten.dsplit.int,
)  # fmt: skip

SPLIT = Behaviour("all dimensions, Partial(sum)", "what changes its owner, for each part")
SLICE_BACKWARD = Behaviour("all dimensions, Partial sums", "what changes its owner along the dimension")


def sharded(tensor: DTensor, dim: int) -> bool:
    """Whether a mesh dimension shards the dimension, be it of one rank only."""
    return any(getattr(placement, "dim", None) == dim for placement in tensor.placements)


def bounds(size: int, start: int | None, stop: int | None, step: int) -> tuple[int, int]:
    """How many indices a slice takes, and the first of them."""
    first, last = 0 if start is None else _index(start, size), size if stop is None else _index(stop, size)
    return max(0, -((first - last) // step)), first


def _index(at: int, size: int) -> int:
    """Where a slice begins or ends: negative numbers count from behind."""
    return min(at, size) if at >= 0 else max(at + size, 0)


@plan_rule(aten.slice.Tensor, behaviour=SLICE, foreign=True)
def slice_(
    operator: _torch.Operator, input: Layout, dim: int, start: int | None, stop: int | None, step: int
) -> Call | None:
    if not input.ndim or step < 1:
        return None  # torch complains
    dim %= input.ndim
    size = input.shape[dim]
    count, first = bounds(size, start, stop, step)
    if dim not in input.sharded_dims:
        shape = (*input.shape[:dim], count, *input.shape[dim + 1 :])
        stride = (*input.stride[:dim], input.stride[dim] * step, *input.stride[dim + 1 :])
        return Call((input,), replace(input, shape=shape, stride=stride), operator, view=True)
    if (count, first, step) == (size, 0, 1):
        return Call((input,), input, lambda x, *_: aten.alias.default(x), view=True)
    where = (dim, start, stop, step)
    return copy_plan(input, {dim: index_map.strided(count, first, step)}).call(
        lambda x, fill: operator(x, *where).clone(), copy=(
            lambda full: operator(full, *where),
            lambda full, part: aten.slice_scatter.default(full, part, *where),
        ),
    )  # fmt: skip


def view_of(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], output: Layout) -> Any:
    """A view operator that every rank runs on its own part."""
    local = operator(_torch.local_of(args[0]), *args[1:], **kwargs)
    return _torch.as_view(operator, args, kwargs, _torch.wrap(local, output.spec))


@plan_rule(aten.slice_backward.default, behaviour=SLICE_BACKWARD)
def slice_backward(
    operator: _torch.Operator, gradient: Layout, sizes: tuple[int, ...], dim: int, start: int, stop: int, step: int
) -> Call:
    dim %= len(sizes)
    count, first = bounds(sizes[dim], start, stop, step)
    if count != gradient.shape[dim]:
        raise Unfit(f"a slice of {count} has a gradient of as many", "give a gradient of the slice's shape")

    def stock(local: torch.Tensor, fill: object) -> torch.Tensor:
        shape = [sizes[dim] if other == dim else size for other, size in enumerate(local.shape)]
        result: torch.Tensor = operator(local, shape, dim, start, stop, step)
        return result

    return copy_plan(gradient, {dim: index_map.spread(sizes[dim], count, first, step)}).call(stock)


@rule(aten.split.Tensor, aten.split_with_sizes.default, behaviour=SPLIT)
def split(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    input, sizes, dim = _torch.arguments(operator, args, kwargs)
    dim %= max(1, input.dim())
    if not sharded(input, dim) and input.dim() and input.shape[dim]:  # DTensor does not split nothing
        return _torch.stock(operator, args, kwargs)
    parts = _part_sizes(input, sizes, dim)
    starts = [sum(parts[:number]) for number in range(len(parts))]
    return [aten.slice.Tensor(input, dim, start, start + size) for start, size in zip(starts, parts, strict=True)]


def _part_sizes(input: DTensor, sizes: int | Sequence[int], dim: int) -> list[int]:
    """Of a symbolic dimension the compiled code holds for as many parts."""
    total = input.shape[dim]
    if isinstance(sizes, Sequence):
        if sum(sizes) != total or min(sizes, default=0) < 0:
            raise refuse("split", f"parts of {list(sizes)} do not make up {total}", (("input", input),), "make them")
        return list(sizes)
    if sizes < 0 or (sizes == 0 and total):
        raise refuse("split", f"parts of {sizes} do not make up {total}", (("input", input),), "give a positive size")
    if not total:
        return [0]
    before = int(-(-total // sizes)) - 1
    return [*[sizes] * before, total - sizes * before]


@rule(aten.unbind.int, behaviour=Behaviour("all other dimensions", "all-to-all: another dimension is sharded"))
def unbind(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All of a dimension's indices at once are the full tensor, so another dimension is sharded instead."""
    input, dim = _torch.arguments(operator, args, kwargs)
    dim %= max(1, input.dim())
    if not sharded(input, dim):
        return _torch.stock(operator, args, kwargs)
    check_placed("unbind", (("input", input),))
    target, results = plan_unbind(_torch.spec_of(input), dim)
    x = move(input, target)
    if not results.present:
        return [results.absent(x) for _ in range(input.shape[dim])]
    return [index_of(input, dim, at, _torch.wrap(_own(one), results.spec)) for at, one in enumerate(x.unbind(dim))]


def _own(one: torch.Tensor) -> torch.Tensor:
    """In memory of its own, so that what is known of it does not hold for the others."""
    return one.clone(memory_format=torch.contiguous_format)


def index_of(input: DTensor, dim: int, index: int, one: DTensor) -> DTensor:
    """`one`, a copy of an index of `input`."""
    return copy_of(
        one, input, lambda full: aten.select.int(full, dim, index),
        lambda full, part: aten.select_scatter.default(full, part, dim, index),
    )  # fmt: skip


@planned
def plan_unbind(spec: _torch.Spec, dim: int) -> tuple[Layout, Layout]:
    """Where the input has to be, and where each of the results lies."""
    target = Layout.of(spec).without_partial("sum").sharded_elsewhere(dim)
    return target, target.without((dim,))
