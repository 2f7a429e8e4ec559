"""Mean and variance over sharded dimensions.

Each rank has the mean of its own values and their variance about it. Few of them are all-gathered, and merged on every
rank about the common mean: nothing large is ever subtracted from something large. Many are added up over the ranks, so
that no message is longer than they are, however many ranks there are.
"""

from __future__ import annotations

from math import nan, prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ... import _torch
from ...comm import all_gather_summaries, all_reduce, are_few, lines_along, rank_line
from ...sharding.call import Call
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, made_of_others
from .._core.cached_tensors import Numbers
from .basic import STAYS
from .plan import Reduction, wide

aten = torch.ops.aten

MOMENTS = Behaviour(STAYS, "all-reduce of mean and variance")

made_of_others(
    *(
        getattr(getattr(aten, name), overload)
        for name in ("var", "std", "var_mean", "std_mean")
        for overload in ("default", "dim")
    )
)


def merge(
    mean: torch.Tensor, var: torch.Tensor, shares: Numbers, mesh: DeviceMesh, mesh_dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all values from those of each rank along `mesh_dims`.

    `shares` says for every rank which part of the values is its own: a number, or one for every result.
    """
    both = torch.stack([mean, var])
    if not are_few(both, prod(map(mesh.size, mesh_dims))):
        own = shares.on(mean.device, torch.float64)[rank_line(mesh, mesh_dims).rank]
        return added_up(mean, var, own, mesh, mesh_dims)
    parts = all_gather_summaries(both.contiguous().unsqueeze(0), lines_along(mesh, mesh_dims))
    means, variances = parts[:, 0], parts[:, 1]
    weights = shares.on(mean.device, mean.dtype)
    weights = weights.view(*weights.shape, *[1] * (means.dim() - 1)) if weights.dim() == 1 else weights
    common = (weights * means).sum(0)
    return common, (weights * (variances + (means - common).square())).sum(0)


def added_up(
    mean: torch.Tensor, var: torch.Tensor, share: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all values from sums over all ranks, to which this one adds its `share`.

    Where means are float32, one sum in float64 is enough: what is lost when the square of the common mean is subtracted
    is less than what a mean has lost by being float32. Those of float64 are added up first, and then squares about it.
    """
    if mean.dtype == torch.float64:
        common = all_reduce(mean * share, mesh, mesh_dims)
        return common, all_reduce((var + (mean - common).square()).mul_(share), mesh, mesh_dims)
    exact = mean.double()
    sums = torch.stack([exact, exact.square().add_(var)]).mul_(share)
    common, squares = all_reduce(sums, mesh, mesh_dims)
    return common.to(mean.dtype), (squares - common.square()).clamp_min_(0).to(mean.dtype)


def moments(plan: Reduction, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance (of a population) over a plan's dimensions, which are left with size 1."""
    if local.numel():
        var, mean = torch.var_mean(local, plan.dims, correction=0, keepdim=True)
    else:
        mean = local.sum(plan.dims, keepdim=True)
        var = mean.abs()
    if not plan.mesh_dims:
        return mean, var
    if mean.is_complex():  # the spread of a complex number is that of its two parts, which are merged apart
        real, imaginary = (
            merge(part, var / 2, plan.shares, plan.mesh, plan.mesh_dims) for part in (mean.real, mean.imag)
        )
        return torch.complex(real[0], imaginary[0]), real[1] + imaginary[1]
    return merge(mean, var, plan.shares, plan.mesh, plan.mesh_dims)


@plan_rule(
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, behaviour=MOMENTS,
    remembers=True,
)  # fmt: skip
def variance(operator: _torch.Operator, input: Layout, dim: Any, correction: float | None, keepdim: bool) -> Call:
    name = _torch.name_of(operator)
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise Unfit(f"there is none of dtype {input.dtype}", "cast to floating point")
    plan = Reduction.of(input, dim, keepdim)
    degrees = max(0.0, plan.count - (1 if correction is None else correction))

    def run(local: torch.Tensor) -> Any:
        mean, var = moments(plan, local.to(wide(local.dtype)))
        if not plan.count:
            mean, var = mean * nan, var * nan
        # As torch has it: with no degrees of freedom left the result is infinite, or NaN where nothing varies.
        var = var * plan.count / torch.full_like(var, degrees)
        spread = var.sqrt() if name.startswith("std") else var
        return (spread, mean) if name.endswith("_mean") else spread

    means = (input.dtype,) if name.endswith("_mean") else ()
    return plan.call(run, input.dtype.to_real(), *means)
