"""Negative log likelihood over any number of spatial dimensions, with batch, space or classes sharded.

A rank picks the classes that it has. The losses, the weights and the number of targets that are no class at all are
all-reduced together: a mean weighs every element right, however uneven the shards are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from ...comm import all_reduce, groups_along, sum_over
from ...geometry import Interval
from ...kernels import synchronous
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, Shard
from ...sharding.table_plan import TablePlan
from ...sharding.table_rule import table_rule
from ..reductions.plan import wide
from .elementwise import MEAN, NONE, SUM

aten = torch.ops.aten

FORWARD = Behaviour(
    "batch, classes, space",
    "all-reduce of 3 numbers; of the picked values where classes are sharded, unreduced (on CPUs one, for bad targets)",
)
BACKWARD = Behaviour("batch, classes, space", "nothing")

Pair = tuple[torch.Tensor, torch.Tensor]


def _class_dim(input: Layout) -> int:
    return 0 if input.ndim == 1 else 1


def _ways(input: Layout, target: Layout, weight: Layout | None) -> Iterator[tuple[str, Placement, Placement]]:
    """Rows without what they have in common: name, placements of the input and of the target."""
    dim = _class_dim(input)
    if not input.shape or target.shape != (*input.shape[:dim], *input.shape[dim + 1 :]):
        raise Unfit("the target must have the input's shape without the class dimension",
                    "give input (N, C, *space) and target (N, *space)")  # fmt: skip
    if weight is not None and weight.shape != (input.shape[dim],):
        raise Unfit(f"the weight needs one number for each of the {input.shape[dim]} classes",
                    f"give it shape ({input.shape[dim]},)")  # fmt: skip
    if target.dtype not in (torch.int64, torch.uint8):
        raise Unfit(f"a target of dtype {target.dtype} names no classes", "cast it to torch.int64")
    yield "replicated", R, R
    yield "classes", Shard(dim), R
    for other in range(target.ndim):
        yield "batch and space", Shard(other + (other >= dim)), Shard(other)


@dataclass(frozen=True)
class Classes:
    """Which classes and targets a rank has, and over which mesh dimensions these are sharded."""

    dim: int
    own: Interval
    count: int  # of all ranks
    mesh: DeviceMesh
    over: tuple[int, ...]  # the mesh dimensions over which classes are sharded
    all_over: tuple[int, ...]  # those over which anything is
    counts_weights: bool  # where classes are sharded, several ranks have a target, and one counts its weight
    by_kernel: bool  # torch's own kernel knows this shape and dtype, and none of classes on other ranks

    @staticmethod
    def of(plan: TablePlan, input: Layout, target: Layout) -> Classes:
        dim = _class_dim(input)
        over = input.sharded_over((dim,))
        spatial = plan.operator in (aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default)
        known = (
            (input.ndim >= 3 if spatial else input.ndim == 2)
            and target.dtype == torch.int64
            and wide(input.dtype) == input.dtype
        )
        first = all(input.mesh.get_local_rank(mesh_dim) == 0 for mesh_dim in over)
        own, count = input.own(dim), input.shape[dim]
        return Classes(dim, own, count, input.mesh, over, input.sharded_over(), first, known and not over)

    def kernel_does(self, x: torch.Tensor) -> bool:
        """One call instead of ten, where it says at once what is wrong."""
        return self.by_kernel and synchronous(x) and bool(x.numel())

    def as_image(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For the kernel of images, space of any dimensions as one of two."""
        if x.dim() in (2, 4):
            return x, target
        return x.reshape(*x.shape[:2], 1, -1), target.reshape(len(target), 1, -1)

    def put_together(self, sums: Sequence[torch.Tensor], reduction: int) -> Pair:
        """From this rank's losses, weights and number of wrong targets to those of all."""
        loss, weights, wrong = sum_over(torch.stack(list(sums)), self._groups).unbind()
        self.raise_if(wrong)
        loss = loss / weights if reduction == MEAN else loss
        return loss if synchronous(loss) else loss.masked_fill(wrong > 0, torch.nan), weights

    @cached_property
    def _groups(self) -> list[dist.ProcessGroup]:
        return groups_along(self.mesh, self.all_over)

    def tell_of(self, wrong: torch.Tensor) -> None:
        """Where nothing else is all-reduced, ranks tell each other how many of their targets are no class."""
        if synchronous(wrong):
            others = [mesh_dim for mesh_dim in self.all_over if mesh_dim not in self.over]
            self.raise_if(all_reduce(wrong.sum(), self.mesh, others))

    def raise_if(self, wrong: torch.Tensor) -> None:
        """All ranks have the same number, and raise alike. A device that runs ahead is not waited for: it has NaN."""
        if synchronous(wrong) and wrong.item():
            raise IndexError(
                f"nll_loss: {int(wrong.item())} targets are neither ignored nor one of {self.count} classes"
            )


class Targets:
    """What this rank's targets ask for."""

    def __init__(
        self, classes: Classes, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
    ):
        t, own = target.long(), classes.own
        counted = t != ignored
        self.wrong = counted & ((t < 0) | (t >= classes.count))  # neither ignored nor a class
        counted = counted & ~self.wrong
        by_class = torch.ones((), dtype=dtype, device=t.device) if weight is None else weight[t.where(counted, 0)]
        self.has = counted & (t >= own.start) & (t < own.stop)  # whether the rank has the class
        self.place = (t - own.start).where(self.has, 0).unsqueeze(classes.dim)  # which of its classes it is
        self.weight = torch.where(counted, by_class.to(dtype), 0)


def _loss(plan: TablePlan, input: Layout, target: Layout, *_: object) -> Callable[..., Pair]:
    classes = Classes.of(plan, input, target)

    def loss(x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int) -> Pair:
        if reduction != NONE and classes.kernel_does(x):
            x, target = classes.as_image(x, target)
            if not classes.all_over:  # all ranks have all of it, and raise alike
                return plan.operator(x, target, weight, reduction, ignored)  # type: ignore[no-any-return]
            try:
                found, weights = plan.operator(x, target, weight, SUM, ignored)
            except IndexError:  # a wrong target: all ranks have to be told before one of them raises
                pass
            else:
                return classes.put_together((found, weights, torch.zeros_like(found)), reduction)
        dtype = wide(x.dtype)
        targets = Targets(classes, target, weight, int(ignored), dtype)
        picked = x.gather(classes.dim, targets.place).squeeze(classes.dim) if len(classes.own) else x.new_zeros(())
        each = torch.where(targets.has, -picked.to(dtype) * targets.weight, 0)
        if reduction == NONE:
            classes.tell_of(targets.wrong)
            each = all_reduce(each, classes.mesh, classes.over)
            return each.masked_fill(targets.wrong, torch.nan).to(x.dtype), x.new_zeros(())
        counted = [targets.weight.sum(), targets.wrong.sum().to(dtype)]
        counted = counted if classes.counts_weights else [torch.zeros_like(number) for number in counted]
        total, weights = classes.put_together((each.sum(), *counted), reduction)
        return total.to(x.dtype), weights.to(x.dtype)

    return loss


def _results(input: Layout, target: Layout, weight: Layout | None, reduction: int, *_: object) -> list[Layout]:
    return [input.new(() if reduction else target.shape), input.new(())]


@table_rule(
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, behaviour=FORWARD, local=_loss, communicates=True,
    one_device=_results,
)  # fmt: skip
def nll_loss(input: Layout, target: Layout, weight: Layout | None, reduction: int, *_: object) -> Iterator[Row]:
    """input, target, weight -> loss, sum of the targets' weights"""
    for name, at, beside in _ways(input, target, weight):
        yield Row(name, (at, beside, R), (R if reduction else beside, R))


def _gradient(
    plan: TablePlan, grad_output: Layout, input: Layout, target: Layout, *_: object
) -> Callable[..., torch.Tensor]:
    classes = Classes.of(plan, input, target)

    def gradient(
        gy: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: Any, reduction: int, ignored: int,
        total: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        if reduction != NONE and classes.kernel_does(x):
            # Of the input only the shape is used, but the kernel wants to write a result without gaps like it.
            image, labels = classes.as_image(x.contiguous(), target)
            gx: torch.Tensor = plan.operator(gy, image, labels, weight, reduction, ignored, total)
            return gx if gx.dim() == x.dim() else gx.view(x.shape)
        targets = Targets(classes, target, weight, int(ignored), wide(x.dtype))
        gy = gy / total if reduction == MEAN else gy
        values = torch.where(targets.has, -targets.weight * gy, 0).to(x.dtype)
        gx = torch.zeros_like(x, memory_format=torch.preserve_format)
        return gx.scatter_(classes.dim, targets.place, values.unsqueeze(classes.dim)) if len(classes.own) else gx

    return gradient


@table_rule(
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, behaviour=BACKWARD, local=_gradient,
    one_device=lambda grad_output, input, *_: [input.dense],
)  # fmt: skip
def nll_loss_backward(
    grad_output: Layout, input: Layout, target: Layout, weight: Layout | None, reduction: int, *_: object
) -> Iterator[Row]:
    """grad_output, input, target, weight, total weight -> gradient of the input"""
    for name, at, beside in _ways(input, target, weight):
        yield Row(name, (R if reduction else beside, at, beside, R, R), (at,))
