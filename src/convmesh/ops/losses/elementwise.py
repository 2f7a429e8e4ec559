"""Losses that compare input and target element by element: every rank its own, and one number is added up."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...comm import all_reduce
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from ..normalization.common import new
from ..reductions.plan import absent, cutting, settled, wide, wrap_dense

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2

FORWARD = Behaviour("all dimensions", "nothing; all-reduce of one number for mean and sum")
BACKWARD = Behaviour("all dimensions", "nothing")

made_of_others(
    aten.l1_loss.default, aten.kl_div.default, aten.poisson_nll_loss.default, aten.broadcast_tensors.default,
    aten.hinge_embedding_loss.default, aten.margin_ranking_loss.default, aten.cosine_embedding_loss.default,
)  # fmt: skip


@dataclass(frozen=True)
class LossPlan:
    operands: tuple[Layout | None, ...]
    elements: Layout  # one loss for each
    total: Layout
    mesh_dims: tuple[int, ...]
    present: bool


@planned
def plan_loss(operator: str, *specs: _torch.Spec | None) -> LossPlan:
    """All operands are cut like the one that is cut the most; those that broadcast are whole along the rest."""
    layouts = [None if spec is None else Layout.of(spec) for spec in specs]
    given = [layout for layout in layouts if layout is not None]
    named = list(zip(("input", "target", "weight", "pos_weight"), layouts, strict=False))
    try:
        shape = tuple(torch.broadcast_shapes(*(layout.shape for layout in given)))
    except RuntimeError:
        raise refuse(operator, "the shapes do not go together", named, "give tensors of one shape") from None
    mesh = given[0].mesh
    placements = tuple(_common(given, shape, mesh_dim) for mesh_dim in range(mesh.ndim))
    elements = new(given[0], shape, placements, given[0].dtype)
    if given[0].shape == shape:
        elements = given[0].placed(placements).dense
    return LossPlan(
        tuple(layout and layout.placed(tuple(_beside(p, layout, shape) for p in placements)) for layout in layouts),
        elements,
        new(given[0], (), (Replicate(),) * mesh.ndim, given[0].dtype),
        cutting(elements, range(len(shape))),
        mesh.get_coordinate() is not None,
    )


def _common(layouts: list[Layout], shape: tuple[int, ...], mesh_dim: int) -> Placement:
    """How the losses are cut along a mesh dimension: as the largest of the operands that are cut there."""
    cut: list[tuple[int, Placement]] = []
    for layout in layouts:
        placement = settled(layout).placements[mesh_dim]
        if isinstance(placement, Shard):
            dim = placement.dim + len(shape) - len(layout.shape)
            if layout.shape[placement.dim] == shape[dim]:
                cut.append((prod(layout.shape), Shard(dim)))
    return max(cut, key=lambda entry: entry[0])[1] if cut else Replicate()


def _beside(placement: Placement, layout: Layout, shape: tuple[int, ...]) -> Placement:
    if not isinstance(placement, Shard):
        return placement
    dim = placement.dim - len(shape) + len(layout.shape)
    return Shard(dim) if dim >= 0 and layout.shape[dim] == shape[placement.dim] else Replicate()


def _planned(operator: str, tensors: tuple[Any, ...]) -> LossPlan:
    named = tuple(zip(("input", "target", "weight", "pos_weight"), tensors, strict=False))
    return plan_loss(operator, *check_placed(operator, named))


@rule(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default, behaviour=FORWARD,
)  # fmt: skip
def loss(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    *given, reduction, numbers = _split(operator, _torch.arguments(operator, args, kwargs))
    plan = _planned(operator._schema.name, tuple(given))
    result = plan.total if reduction else plan.elements
    if not plan.present:
        return absent(given[0], result)
    local = [move(tensor, target) for tensor, target in zip(given, plan.operands, strict=True)]
    if not plan.mesh_dims:  # a rank has all of them
        return wrap_dense(operator(*local, reduction, *numbers), result)
    each = operator(*local, NONE, *numbers)
    if reduction == NONE:
        return wrap_dense(each, plan.elements)
    total = all_reduce(each.sum(dtype=wide(each.dtype)), plan.elements.mesh, plan.mesh_dims)
    return wrap_dense(total / prod(plan.elements.shape) if reduction == MEAN else total, plan.total)


@rule(
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default, aten.soft_margin_loss_backward.default, behaviour=BACKWARD,
)  # fmt: skip
def loss_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    gradient, *given, reduction, numbers = _split(operator, _torch.arguments(operator, args, kwargs))
    plan = _planned(operator._schema.name, tuple(given))
    check_placed(operator._schema.name, (("grad_output", gradient), ("input", given[0])))
    if not plan.present:
        return absent(given[0], plan.elements)
    # Where a backward pass is differentiated, torch gives one gradient for each element of a total as well.
    gy = move(gradient, plan.elements if gradient.dim() else plan.total)
    local = [move(tensor, target) for tensor, target in zip(given, plan.operands, strict=True)]
    if reduction == MEAN:  # over all ranks' elements, which the kernel does not know of
        gy = gy / prod(plan.elements.shape)
    return wrap_dense(operator(gy, *local, SUM if reduction else NONE, *numbers), plan.elements)


def _split(operator: _torch.Operator, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """(*tensors, reduction, the numbers that come after it)"""
    place = _torch.signature(operator).names.index("reduction")
    return *arguments[:place], arguments[place], arguments[place + 1 :]
