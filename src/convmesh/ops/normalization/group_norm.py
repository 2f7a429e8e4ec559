"""Group norm: statistics by sample and group, with space and channels sharded, between groups or inside of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...geometry import Interval
from ...kernels.batch_norm import BY_OPERATORS, Running, Steps
from ...kernels.batch_norm_cpu import BY_LIBRARY
from ...kernels.normalization import Pair, input_gradient, moments_of_groups, normalised, sums_by_set
from ...sharding.call import Call, Goal, Moved, Reported
from ...sharding.errors import refuse
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, made_of_others
from .._core.cached_tensors import Constant
from ..reductions.plan import counts, wide
from .common import Named, Spread, arrange, parameter_gradient, rows  # fmt: skip

aten = torch.ops.aten

made_of_others(aten.group_norm.default)

COMMUNICATION = "nothing; all-reduce of 2 numbers a group, sample and rank where space or a group is sharded"
BEHAVIOUR = Behaviour("batch, channels, space", COMMUNICATION)


@dataclass(frozen=True)
class GroupNormPlan:
    operands: tuple[Layout | None, ...]  # input, weight, bias
    output: Layout
    statistics: Layout
    spread: Spread
    channels: Interval  # this rank's
    per_group: int
    full_groups: bool  # every rank has all of its groups, and knows these only; else it knows all groups
    parameters: tuple[Moved, ...]  # of their gradients

    def columns(self, device: torch.device) -> torch.Tensor:
        """For each of this rank's channels, which column of the statistics it belongs to."""
        return self._columns.on(device)

    @cached_property
    def _columns(self) -> Constant:
        first = self.channels.start // self.per_group if self.full_groups else 0
        return Constant([at // self.per_group - first for at in range(self.channels.start, self.channels.stop)])

    def by_channel(self, numbers: torch.Tensor, dims: int) -> torch.Tensor:
        """[N G] -> [N C 1 1 ...], with so many dimensions: for each channel that of its group."""
        if self.full_groups:
            spread = numbers.unsqueeze(2).expand(-1, -1, self.per_group)
        else:
            spread = numbers[:, self.columns(numbers.device)]
        return spread.reshape(numbers.shape[0], len(self.channels), *[1] * (dims - 2))

    def by_group(self, numbers: torch.Tensor) -> torch.Tensor:
        """[N C] -> [N G]: sums of what this rank's channels have of each group."""
        if self.full_groups:
            return numbers.view(numbers.shape[0], self.groups, self.per_group).sum(2)
        zeros = numbers.new_zeros(numbers.shape[0], self.groups)
        return zeros.index_add_(1, self.columns(numbers.device), numbers)

    @property
    def groups(self) -> int:
        """Columns of the statistics that this rank holds."""
        return len(self.channels) // self.per_group if self.full_groups else self.statistics.shape[1]


def plan_group_norm(
    operator: str, groups: int, input: Layout, weight: Layout | None, bias: Layout | None = None
) -> GroupNormPlan:
    named: Named = (("input", input), ("weight", weight), ("bias", bias))
    _check(operator, groups, named, input)
    dims = len(input.shape)
    operands = arrange(operator, rows((0, *range(2, dims)), ((1, 0),), 2), named)
    placed = operands[0]
    assert placed is not None
    per_group = max(1, input.shape[1] // groups)
    full_groups = all(size % per_group == 0 for size, _ in placed.shards(1).runs)
    kept = (Shard(0), Shard(1)) if full_groups else (Shard(0),)
    by_group = tuple(p if p in kept else Replicate() for p in placed.placements)
    by_channel = tuple(Shard(0) if p == Shard(1) else Replicate() for p in placed.placements)
    dtype = next((given.dtype for given in (weight, bias) if given is not None), input.dtype)
    plain = input.new((input.shape[1],), by_channel, dtype)
    return GroupNormPlan(
        operands, placed.dense,
        input.new((input.shape[0], groups), by_group,
            wide(input.dtype)),
        Spread.over(placed, range(2, dims)) if full_groups else _spread_groups(placed, groups, per_group),
        placed.own(1) if input.present else Interval(0, 0), per_group, full_groups,
        tuple(Moved(*parameter_gradient(given or plain, placed, plain, pending=True)) for given in (weight, bias)),
    )  # fmt: skip


def _check(operator: str, groups: int, named: Named, input: Layout) -> None:
    if len(input.shape) < 2 or groups < 1 or input.shape[1] % groups:
        raise refuse(operator, f"the input needs channels that are a multiple of `num_groups` (={groups})", named,
                     "give an input of shape (N, C, *space)")  # fmt: skip
    for name, given in named[1:]:
        if given is not None and given.shape != (input.shape[1],):
            raise refuse(operator, f"{name} needs one number for each of the {input.shape[1]} channels", named,
                         f"give it shape ({input.shape[1]},)")  # fmt: skip


def _spread_groups(placed: Layout, groups: int, per_group: int) -> Spread:
    """Where channels are sharded inside of groups, a rank's share is another for every group."""
    space = range(2, len(placed.shape))
    mesh_dims = placed.sharded_over((1, *space))
    values = per_group * prod(placed.shape[2:])
    shares = []
    places = product(*(range(placed.mesh.size(mesh_dim)) for mesh_dim in mesh_dims))
    for at, around in zip(places, counts(placed, space, mesh_dims), strict=True):
        channels = placed.part_at(1, dict(zip(mesh_dims, at, strict=True)))
        owned = (len(channels & Interval(g * per_group, (g + 1) * per_group)) for g in range(groups))
        shares.append(((tuple(n * around / max(1, values) for n in owned)),))
    return Spread(placed.mesh, mesh_dims, tuple(shares), values)


@plan_rule(aten.native_group_norm.default, behaviour=BEHAVIOUR)
def group_norm(
    operator: _torch.Operator, input: Layout, weight: Layout | None, bias: Layout | None, *numbers: Any
) -> Call:
    *_, groups, eps = numbers
    plan = plan_group_norm("group_norm", groups, input, weight, bias)

    def run(x: torch.Tensor, w: Any, b: Any, *_: Any) -> tuple[Any, ...]:
        x = x.contiguous(memory_format=plan.output.memory_format)
        if not plan.spread.mesh_dims and x.numel():
            y, *statistics = operator(x, w, b, x.shape[0], x.shape[1], prod(x.shape[2:]), plan.groups, eps)
        else:
            y, *statistics = _normalise(plan, x, w, b, eps)
        return y, *((one, plan.statistics.typed(one.dtype)) for one in statistics)

    return Call(plan.operands, (plan.output, Reported(plan.statistics), Reported(plan.statistics)), run)


def _as_batch_norm(plan: GroupNormPlan, *tensors: torch.Tensor) -> bool:
    """Whether every channel of every sample is normalised by itself: a batch norm of one sample with all of them as
    channels, which takes fewer operators. Those of half precision are computed in another."""
    alike = plan.full_groups and plan.per_group == 1 and plan.output.dtype == plan.statistics.dtype
    return alike and plan.output.is_contiguous and all(tensor.is_contiguous() for tensor in tensors)


def _one_sample(x: torch.Tensor) -> torch.Tensor:
    """[N C space] -> [1 NC space]"""
    return x if len(x) == 1 else x.view(1, x.shape[0] * x.shape[1], *x.shape[2:])


def _of_samples(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[1 NC space] -> [N C space]"""
    return x if len(like) == 1 else x.view(like.shape)


def _for_samples(x: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter if parameter is None or len(x) == 1 else parameter.repeat(len(x))


def _steps(plan: GroupNormPlan, *tensors: torch.Tensor | None) -> Steps:
    """Those of the compiled library, where the plan and this rank's tensors are for it."""
    alike = all(tensor is None or tensor.dtype == plan.output.dtype for tensor in tensors)
    known = plan.output.dtype in (torch.float32, torch.float64)
    compiled = alike and known and plan.spread.compiled() and not _torch.any_lazy(*tensors)
    return BY_LIBRARY if compiled else BY_OPERATORS


def _normalise(plan: GroupNormPlan, x: torch.Tensor, w: Any, b: Any, eps: float) -> tuple[torch.Tensor, ...]:
    if _as_batch_norm(plan, x):
        steps, sample = _steps(plan, x, w, b), _one_sample(x)
        own = plan.spread.gather(steps.channel_moments(sample, plan.statistics.dtype))
        parameters = _for_samples(x, w), _for_samples(x, b)
        no_statistics = Running(None, None, 0.0)
        found = steps.normalised_by_ranks(sample, own, plan.spread.merging(own), eps, *parameters, no_statistics)
        return _of_samples(found.output, x), found.mean.view(x.shape[:2]), found.rstd.view(x.shape[:2])
    # A group of which the rank has some channels only is made of these, one by one.
    local_groups = plan.groups if plan.full_groups else len(plan.channels)
    compiled = plan.spread.compiled()
    moments = moments_of_groups(x.to(plan.statistics.dtype), local_groups, compiled)
    if not plan.full_groups:
        moments = _regroup(plan, *moments)
    mean, var = plan.spread.merge(*moments) if plan.spread.mesh_dims else moments
    by_channel = plan.by_channel(mean, x.dim()), plan.by_channel(var, x.dim())
    w, b = (None if t is None else t.to(mean.dtype).view(-1, *[1] * (x.dim() - 2)) for t in (w, b))
    return normalised(x, by_channel, eps, w, b, compiled), mean, (var + eps).rsqrt()


def _regroup(plan: GroupNormPlan, mean: torch.Tensor, var: torch.Tensor) -> Pair:
    """[N C] -> [N G]: the moments of the channels that this rank has of each group."""
    channels = plan.by_group(torch.ones_like(mean[:1])).clamp_(min=1)
    grouped = plan.by_group(mean) / channels
    spread = var + (mean - plan.by_channel(grouped, 2)).square()
    return grouped, plan.by_group(spread) / channels


@plan_rule(aten.native_group_norm_backward.default, behaviour=BEHAVIOUR)
def group_norm_backward(
    operator: _torch.Operator, gradient: Layout, input: Layout, mean: Layout, rstd: Layout, weight: Layout | None,
    *numbers: Any,
) -> Call:  # fmt: skip
    *_, groups, mask = numbers
    plan = plan_group_norm("group_norm_backward", groups, input, weight)
    output, statistics = plan.output, plan.statistics.placements

    def run(gy: torch.Tensor, x: torch.Tensor, m: torch.Tensor, r: torch.Tensor, w: Any, *_: Any) -> Any:
        if plan.spread.mesh_dims or not x.numel():
            return _gradients(plan, gy, x, m, r, w)
        gy, x = (tensor.contiguous(memory_format=output.memory_format) for tensor in (gy, x))
        return operator(gy, x, m, r, w, x.shape[0], x.shape[1], prod(x.shape[2:]), plan.groups, mask)

    beside = gradient.placed(output.placements), *plan.operands[:1], mean.placed(statistics), rstd.placed(statistics)
    every: tuple[Goal, ...] = (output, *plan.parameters)
    results = [one if asked else None for one, asked in zip(every, mask, strict=True)]
    return Call((*beside, plan.operands[1]), results, run)


def _gradients(
    plan: GroupNormPlan, gy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: Any
) -> tuple[torch.Tensor, ...]:
    if _as_batch_norm(plan, gy, x) and mean.dtype == gy.dtype == x.dtype:
        steps, values = _steps(plan, gy, x, w, mean, rstd), prod(plan.output.shape[2:])
        moments = mean.contiguous(), rstd.contiguous()
        if steps is not BY_LIBRARY:  # which asks nobody for the shape
            moments = moments[0].view(-1), moments[1].view(-1)
        given = _one_sample(gy), _one_sample(x), *moments
        own = steps.channel_sums(*given)
        gx = steps.gradient_by_sums(*given, _for_samples(x, w), plan.spread.total(own, keeps=True), values)
        products, plain = own.unbind() if len(x) == 1 else own.view(2, *x.shape[:2]).sum(1).unbind()
        return _of_samples(gx, x), products, plain
    gy, x = (t.to(mean.dtype) for t in (gy, x))
    compiled = plan.spread.compiled()
    moments = plan.by_channel(mean, x.dim()), plan.by_channel(rstd, x.dim())
    plain, products = (t.view(x.shape[:2]) for t in sums_by_set(gy, x, *moments, compiled))
    sums = plan.spread.start_adding_up(*(plan.by_group(t if w is None else t * w) for t in (plain, products)))
    count = max(1, plan.per_group * prod(plan.output.shape[2:]))

    def means() -> Pair:
        first, second = sums()
        return plan.by_channel(first / count, x.dim()), plan.by_channel(second / count, x.dim())

    weight = None if w is None else w.view(-1, *[1] * (x.dim() - 2))
    return input_gradient(gy, x, moments, means, weight, compiled), products.sum(0), plain.sum(0)
