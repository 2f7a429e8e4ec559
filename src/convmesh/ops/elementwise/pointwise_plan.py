"""Placements of the operands and the result of an elementwise operator.

Along each mesh dimension the result is sharded like an operand that has the full dimension; a replicated operand beside
it is narrowed locally, without communication. Operands that are sharded differently are redistributed at least cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ... import _torch
from ...sharding.errors import ShardingError
from ...sharding.layout import Layout
from ...sharding.redistribute import layouts_of
from ...sharding.sharding_table import Assignment, Row, choose, input_placements, output_placements
from ...strides import Usual, has_idle_strides
from .linear_rows import PartialRow, linear_rows

R = Replicate()

Narrow = tuple[int, int, int]
"""(dimension, first index that is kept, how many are kept)."""

Operands = Sequence[Layout | None]
"""One layout per argument; None for arguments that are not DTensors."""

# Binary operators whose meta functions give results in another dimension order than their kernels do.
aten = torch.ops.aten
STRIDES_OF_ADD = frozenset((
    aten.copysign.Tensor, aten.floor_divide.default, aten.special_xlog1py.default, aten.xlogy.Tensor,
    aten.elu_backward.default, aten.hardsigmoid_backward.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.logit_backward.default, aten.native_dropout_backward.default,
    aten.softplus_backward.default,
))  # fmt: skip


@dataclass(frozen=True)
class Step:
    """How to prepare an operand: redistribute it if necessary, then narrow it on the rank."""

    moved: Layout | None
    narrows: tuple[Narrow, ...]
    zero: bool = False  # it is added to a Partial(sum), and another rank adds it: this one uses zeros


@dataclass(frozen=True)
class PointwisePlan:
    """What to do with each operand, and the result's layout."""

    steps: tuple[Step | None, ...]  # by argument; None if it needs no preparation
    output: Layout
    reduces: bool = False  # the tensor that is written is a Partial(sum), and must be reduced first
    writes_terms: bool = False  # the tensor that is written is Partial, and every rank writes its own term
    scales: bool = False  # a tensor that stays Partial is multiplied or divided by a number
    use_torch: bool = False  # left to torch's DTensor: the shards or the mesh are in an unusual order
    is_local: bool = False  # no argument needs preparation
    restrided: tuple[tuple[int, Usual], ...] = ()  # (argument, how to restride it) where a local size is 0 or 1
    specs: dict[torch.dtype, _torch.Spec] = field(default_factory=dict)

    def spec(self, dtype: torch.dtype) -> _torch.Spec:
        found = self.specs.get(dtype)
        if found is None:
            found = self.specs[dtype] = self.output.typed(dtype).spec
        return found


def plan_pointwise(
    operator: _torch.Operator, args: Sequence[Any], kwargs: Mapping[str, Any], specs: Sequence[_torch.Spec | None]
) -> PointwisePlan:
    """Plan one call of an elementwise operator."""
    given = [spec for spec in specs if spec is not None]
    operands = [None if spec is None else Layout.of(spec) for spec in specs]
    if any(spec.mesh != given[0].mesh for spec in given):
        layouts_of(_torch.name_of(operator), [(f"operand {n}", spec) for n, spec in enumerate(specs)])  # refuses them
    shape, stride = _result(operator, args, kwargs, operands)
    model = next(layout for layout in operands if layout is not None)
    output = Layout(model.mesh, model.placements, shape, stride, model.dtype)
    if _same_layout(given) and not any(isinstance(p, Partial) for p in model.placements):
        return PointwisePlan((None,) * len(specs), output, is_local=True, restrided=_restrided(specs))
    if not all(_torch.plain_order(spec) for spec in given) or not _torch.in_rank_order(model.mesh):
        return PointwisePlan((), output, use_torch=True)
    chosen = _choose(operator, operands, output, kwargs)
    if chosen is None:
        return PointwisePlan((), output, reduces=True)
    plan = _plan(operands, output.placed(output_placements(chosen, 0)), chosen, operator._schema.is_mutable)
    scales = any(isinstance(p, Partial) for p in plan.output.placements) and any(map(is_number, args))
    return replace(plan, scales=True, is_local=False) if scales else plan


def is_number(arg: Any) -> bool:
    return isinstance(arg, int | float | complex)


def _restrided(specs: Sequence[_torch.Spec | None]) -> tuple[tuple[int, Usual], ...]:
    """The arguments whose local strides must be replaced by the full tensor's (see `PointwisePlan.restrided`)."""
    given = [(number, spec, Layout.of(spec)) for number, spec in enumerate(specs) if spec is not None]
    return tuple(
        (number, Usual(layout.stride))
        for number, spec, layout in given
        if not _torch.plain_order(spec) or has_idle_strides(layout.local_shape)
    )


def _same_layout(specs: Sequence[_torch.Spec]) -> bool:
    """Whether all operands have the same shape and placements."""
    first = specs[0]
    return all(
        spec.placements == first.placements and spec.shape == first.shape and spec.shard_order == first.shard_order
        for spec in specs
    )


def _result(
    operator: _torch.Operator, args: Sequence[Any], kwargs: Mapping[str, Any], operands: Operands
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of the result on one device; torch itself raises if the shapes do not fit."""
    with _torch.meta_tensors(any(layout is not None and _torch.has_symbols(layout.shape) for layout in operands)):
        models = [arg if layout is None else _meta_tensor(layout) for arg, layout in zip(args, operands, strict=True)]
        options = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        result = operator(*models, **options)
        tensors = [model for model in models if isinstance(model, torch.Tensor)]
        if operator in STRIDES_OF_ADD and len(tensors) == 2:
            result = torch.add(*tensors)
        elif operator is aten.pow.Scalar:
            result = result.contiguous()
    return tuple(result.shape), tuple(result.stride())


def _meta_tensor(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def _choose(
    operator: _torch.Operator, operands: Operands, output: Layout, kwargs: Mapping[str, Any]
) -> Assignment | None:  # fmt: skip
    """Choose a row for every mesh dimension; None if the written tensor cannot keep its Partial(sum)."""
    shape = output.shape
    written = operands[0] if operator._schema.is_mutable else None
    rows = [Row("replicated", _by_operand(operands, lambda layout: R), (R,))]
    rows += [_sharded_row(operands, shape, dim) for dim in sorted(_sharded_dims(operands, len(shape)))]
    rows += linear_rows(operator, operands, kwargs, prod(shape))
    name = operator._schema.name.removeprefix("aten::")
    named = [(f"operand {number}", layout) for number, layout in enumerate(operands)]
    operand_dims = [_sharded_dims(operands, len(shape), mesh_dim) for mesh_dim in range(output.mesh.ndim)]

    def fits(chosen: Assignment) -> bool:
        """Never reduce-scatter a Partial(sum) where no operand is sharded: the next operator would gather it again."""
        placements = output_placements(chosen, 0)
        if written is not None and placements != written.placements:
            return False
        return all(not isinstance(p, Shard) or p.dim in dims for p, dims in zip(placements, operand_dims, strict=True))

    def later_reduction(row: Row, mesh_dim: int) -> float:
        """A Partial result must still be reduced, so an operand of the result's size is not gathered for it."""
        gathers = any(
            type(layout.placements[mesh_dim]) is Shard and target == R
            for layout, target in zip(operands, row.inputs, strict=True)
            if layout is not None and prod(layout.shape) == prod(shape)
        )
        return prod(shape) if gathers and isinstance(row.outputs[0], Partial) else 0

    try:
        return choose(name, rows, named, fits=fits, extra=later_reduction)
    except ShardingError:
        if written is not None and any(isinstance(placement, Partial) for placement in written.placements):
            return None
        raise


def _by_operand(operands: Operands, placement: Any) -> tuple[Placement, ...]:
    return tuple(R if layout is None else placement(layout) for layout in operands)


def _sharded_dims(operands: Operands, rank: int, mesh_dim: int | None = None) -> set[int]:
    """Return the result's dimensions along which an operand is sharded; with `mesh_dim`, over that mesh dimension."""
    return {
        dim + rank - len(layout.shape)
        for layout in operands
        if layout is not None
        for dim, mesh_dims in layout.sharded_dims.items()
        if mesh_dim is None or mesh_dim in mesh_dims
    }


def _sharded_row(operands: Operands, shape: tuple[int, ...], dim: int) -> Row:
    """Return the row in which every operand that has the full dimension is sharded along it."""

    def placement(layout: Layout) -> Placement:
        own = dim - (len(shape) - len(layout.shape))
        return Shard(own) if own >= 0 and layout.shape[own] == shape[dim] else R

    return Row(f"dimension {dim}", _by_operand(operands, placement), (Shard(dim),))


def _plan(operands: Operands, output: Layout, chosen: Assignment, in_place: bool) -> PointwisePlan:
    """Return the plan for the chosen rows."""
    own_rows = zip(chosen, output.mesh.get_coordinate() or (), strict=False)
    zeros = {n for row, rank in own_rows if isinstance(row, PartialRow) and rank for n in row.first_rank_only}
    steps = tuple(
        None if layout is None else _step(layout, layout.placed(input_placements(chosen, number)), number in zeros)
        for number, layout in enumerate(operands)
    )
    writes_terms = in_place and any(isinstance(placement, Partial) for placement in output.placements)
    is_local = not (writes_terms or any(steps))
    restrided = _restrided([None if layout is None else layout.spec for layout in operands]) if is_local else ()
    return PointwisePlan(steps, output, writes_terms=writes_terms, is_local=is_local, restrided=restrided)


def _step(source: Layout, target: Layout, zero: bool) -> Step | None:
    """Return how an operand gets from `source` to `target`: what is replicated is narrowed, the rest redistributed."""
    if source.placements == target.placements:
        return Step(None, (), True) if zero else None
    on_the_way = target
    for mesh_dim, before in reversed(list(enumerate(source.placements))):
        if isinstance(before, Replicate) and _is_innermost(on_the_way, mesh_dim):
            placements = on_the_way.placements
            on_the_way = target.placed((*placements[:mesh_dim], R, *placements[mesh_dim + 1 :]))
    moved = on_the_way if on_the_way.placements != source.placements else None
    if not source.present:
        return Step(moved, (), zero)
    narrows = []
    for dim in range(len(source.shape)):
        held, wanted = on_the_way.own(dim), target.own(dim)
        if held != wanted:
            narrows.append((dim, wanted.start - held.start if len(wanted) else 0, len(wanted)))
    return Step(moved, tuple(narrows), zero)


def _is_innermost(layout: Layout, mesh_dim: int) -> bool:
    """Whether this mesh dimension is the innermost that shards its tensor dimension.

    Then a rank that it does not shard holds its shard within one contiguous range, and can narrow to it.
    """
    placement = layout.placements[mesh_dim]
    return isinstance(placement, Shard) and layout.sharded_dims[placement.dim][-1] == mesh_dim
