"""Mean and variance over sharded dimensions.

Each rank computes the mean of its own values and their variance about it. If these are few, they are all-gathered, and
every rank merges them about the common mean: nothing large is ever subtracted from something large. If they are many,
they are all-reduced, so that messages do not grow with the number of ranks.
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
from .._core.cached_tensors import Constant
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


def merge_moments(
    mean: torch.Tensor, var: torch.Tensor, shares: Constant, mesh: DeviceMesh, mesh_dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of all values, from those of each rank along `mesh_dims`.

    `shares` has each rank's fraction of the values: one number, or one for every result.
    """
    both = torch.stack([mean, var])
    if not are_few(both, prod(map(mesh.size, mesh_dims))):
        own = shares.on(mean.device, torch.float64)[rank_line(mesh, mesh_dims).rank]
        return merge_by_all_reduce(mean, var, own, mesh, mesh_dims)
    parts = all_gather_summaries(both.contiguous().unsqueeze(0), lines_along(mesh, mesh_dims))
    means, variances = parts[:, 0], parts[:, 1]
    weights = shares.on(mean.device, mean.dtype)
    weights = weights.view(*weights.shape, *[1] * (means.dim() - 1)) if weights.dim() == 1 else weights
    common = (weights * means).sum(0)
    return common, (weights * (variances + (means - common).square())).sum(0)


def merge_by_all_reduce(
    mean: torch.Tensor, var: torch.Tensor, share: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and variance of all values from sums over all ranks, to which this rank adds its `share`.

    For float32 means one all-reduce in float64 is enough: subtracting the square of the common mean loses less than the
    means have lost by being float32. For float64 the means are reduced first, and then the squares about the common
    mean.
    """
    if mean.dtype == torch.float64:
        common = all_reduce(mean * share, mesh, mesh_dims)
        return common, all_reduce((var + (mean - common).square()).mul_(share), mesh, mesh_dims)
    exact = mean.double()
    sums = torch.stack([exact, exact.square().add_(var)]).mul_(share)
    common, squares = all_reduce(sums, mesh, mesh_dims)
    return common.to(mean.dtype), (squares - common.square()).clamp_min_(0).to(mean.dtype)


def moments(plan: Reduction, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and (population) variance over the plan's dimensions, which are kept with size 1."""
    if local.numel():
        var, mean = torch.var_mean(local, plan.dims, correction=0, keepdim=True)
    else:
        mean = local.sum(plan.dims, keepdim=True)
        var = mean.abs()
    if not plan.mesh_dims:
        return mean, var
    if mean.is_complex():  # real and imaginary parts are merged separately; the variance is their sum
        real, imaginary = (
            merge_moments(part, var / 2, plan.shares, plan.mesh, plan.mesh_dims) for part in (mean.real, mean.imag)
        )
        return torch.complex(real[0], imaginary[0]), real[1] + imaginary[1]
    return merge_moments(mean, var, plan.shares, plan.mesh, plan.mesh_dims)


@plan_rule(
    aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction, behaviour=MOMENTS,
    remembers=True,
)  # fmt: skip
def variance(operator: _torch.Operator, input: Layout, dim: Any, correction: float | None, keepdim: bool) -> Call:
    name = _torch.name_of(operator)
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise Unfit(f"there is no variance of dtype {input.dtype}", "cast to floating point")
    plan = Reduction.of(input, dim, keepdim)
    degrees = max(0.0, plan.count - (1 if correction is None else correction))

    def run(local: torch.Tensor) -> Any:
        mean, var = moments(plan, local.to(wide(local.dtype)))
        if not plan.count:
            mean, var = mean * nan, var * nan
        # As in torch: with no degrees of freedom the result is infinite, or NaN where nothing varies.
        var = var * plan.count / torch.full_like(var, degrees)
        deviation = var.sqrt() if name.startswith("std") else var
        return (deviation, mean) if name.endswith("_mean") else deviation

    means = (input.dtype,) if name.endswith("_mean") else ()
    return plan.call(run, input.dtype.to_real(), *means)
