"""Moments from sums of squares: as good as those of a kernel that subtracts the mean, or left to it."""

from __future__ import annotations

import pytest
import torch

from convmesh.ops import norm_kernels as kernels
from convmesh.ops.raw_moments import FEWEST_VALUES, raw_moments

ROW = kernels.ROW
EPS = torch.finfo(torch.float32).eps


def numbers(sets: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sets * rows)
    return torch.randn(sets, rows * ROW, dtype=torch.float64, generator=generator).to(dtype)


def errors(moments: tuple[torch.Tensor, ...], x: torch.Tensor) -> tuple[float, float]:
    """Of mean and variance, in deviations and relatively; typical, not greatest."""
    var, mean = torch.var_mean(x.double(), 1, correction=0)
    in_mean, in_var = (moments[0] - mean) / var.sqrt(), (moments[1] - var) / var
    return in_mean.square().mean().sqrt().item(), in_var.square().mean().sqrt().item()


@pytest.mark.parametrize(("sets", "rows"), [(64, 4), (64, 8), (16, 32), (4, 256)])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.98, -0.98])
def test_as_good_as_the_kernel_up_to_the_largest_mean(sets: int, rows: int, share: float) -> None:
    largest = (min(5.0, rows**0.5) - 1) ** 0.5
    x = numbers(sets, rows)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True) + share * largest
    found = raw_moments(x.view(-1, ROW), sets)
    assert found is not None
    assert found[2] == []
    ours, theirs = errors(found[:2], x), errors(kernels._stable_moments(x.view(-1, ROW), sets), x)
    assert ours[0] <= theirs[0] + EPS / 2
    assert ours[1] <= theirs[1] + EPS


@pytest.mark.parametrize("offset", [2.2, 10.0, 1e3, 1e6])
def test_sets_far_from_zero_are_left_to_the_kernel(offset: float) -> None:
    x = numbers(16, 32) + offset
    assert raw_moments(x.view(-1, ROW), 16) is None
    x[:8] -= offset
    found = raw_moments(x.view(-1, ROW), 16)
    assert found is not None
    assert found[2] == list(range(8, 16))
    mean, var = kernels.moments_of_sets(x, 16)
    stable = kernels._stable_moments(x[8:].view(-1, ROW), 8)
    assert torch.equal(mean[8:], stable[0])
    assert torch.equal(var[8:], stable[1])
    in_mean, in_var = errors((mean, var), x)
    assert in_mean < 2 * EPS * offset
    assert in_var < 10 * EPS + (2 * EPS * offset) ** 2


def test_a_few_sets_of_any_kind_do_not_spoil_the_others() -> None:
    x = numbers(12, 32)
    for number, value in enumerate((torch.inf, -torch.inf, torch.nan)):
        x[number, 77] = value
    x[3] = 0.5
    x[4] = 0
    x[5] *= 1e25
    x[6] *= 1e-20
    x[7] += 1e4
    found = raw_moments(x.view(-1, ROW), 12)
    assert found is not None
    assert found[2] == [0, 1, 2, 3, 5, 6, 7]
    mean, var = kernels.moments_of_sets(x, 12)
    assert not var[:3].isfinite().any()
    assert not mean[:3].isfinite().any()
    assert var[3] < 1e-12
    assert mean[4] == var[4] == 0
    assert not var[5].isfinite()  # float32 has no such number
    assert var[6] < 1e-37
    ordinary = [8, 9, 10, 11]
    assert max(errors((mean[ordinary], var[ordinary]), x[ordinary])) < 2 * EPS
    assert max(errors((mean[7:8], var[7:8]), x[7:8])) < 2e-3  # of a mean of 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e-14, 1e14, 1e18, 1e25])
def test_small_and_large_numbers(scale: float, dtype: torch.dtype) -> None:
    x = numbers(16, 32, dtype) * scale
    found, stable = kernels.moments_of_sets(x, 16), kernels._stable_moments(x.view(-1, ROW), 16)
    for ours, theirs in zip(found, stable, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * scale, equal_nan=True)


def test_what_is_too_little_to_gain_anything_is_left_to_the_kernel() -> None:
    assert raw_moments(torch.randn(2 * FEWEST_VALUES // ROW, ROW), 1) is not None
    assert raw_moments(torch.randn(FEWEST_VALUES // ROW - 1, ROW), 1) is None
    assert raw_moments(torch.randn(1024, ROW), 512) is None  # sets of two rows
    assert raw_moments(torch.randn(4096, ROW), 1024) is None
