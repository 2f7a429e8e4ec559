"""What norms compute on one rank: moments in pieces or at once, and applying them in any memory format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from convmesh.kernels import library, normalization, normalization_cpu
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.agreement import Sample, agree

SHAPES = [(2, 6, 5, 7), (1, 6, 9), (3, 6, 2, 3, 4), (2, 6, 1, 1)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def without_compiled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(library, "takes", lambda _: False)


def pieces(patch: pytest.MonkeyPatch, in_cache: int, row: int) -> None:
    """Have moments taken, by torch's kernels, of rows of about so many values, some of them at a time."""
    without_compiled(patch)
    patch.setattr(normalization_cpu, "IN_CACHE", in_cache)
    patch.setattr(normalization_cpu, "ROW", row)
    patch.setattr(normalization_cpu, "LONG", 1)


def assert_moments(found: tuple[torch.Tensor, ...], of: torch.Tensor) -> None:
    """Those of the last dimension of `of`, whose values vary by about one."""
    var, mean = torch.var_mean(of, -1, correction=0)
    assert_close(found[0].reshape(mean.shape), mean)
    assert_close(found[1].reshape(var.shape), var, scale=1)


@pytest.mark.parametrize(("in_cache", "row"), [(1, 4), (40, 8), (40, 1), (1 << 18, 1 << 10)])
@pytest.mark.parametrize("shape", SHAPES)
def test_moments_are_those_of_all_values(
    shape: tuple[int, ...], in_cache: int, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces(monkeypatch, in_cache, row)
    for mean in (0, 1, 1000):  # nothing may be lost of the variance beside the mean
        x = numbers(*shape) + mean
        for groups in (1, 3, 6):
            assert_moments(normalization.moments_of_groups(x, groups), x.reshape(shape[0], groups, -1))
        assert_moments(normalization.moments_of_channels(x), x.transpose(0, 1).reshape(6, -1))
        assert_moments(normalization.moments_of_sets(x, shape[0] * 6), x.flatten(2))


@pytest.mark.parametrize("mean", [0.0, 1.5, 30.0, 1e4])
@pytest.mark.parametrize("by_torch", [True, False])
def test_many_values_lose_little_to_rounding(mean: float, by_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a cache has, in float32, of which one set may be far from zero."""
    if by_torch:
        without_compiled(monkeypatch)
    x = numbers(3, 1 << 17)
    x[1] += mean
    x = x.float()
    found, expected = normalization.moments_of_sets(x, 3), torch.var_mean(x.double(), 1, correction=0)
    assert_close(found[0], expected[1], scale=max(mean, 1))
    # Both are rounded some times, and what a mean has lost goes into the variance squared.
    rounding = 4 * torch.finfo(torch.float32).eps
    assert ((found[1] - expected[0]).abs() < (rounding + (rounding * mean) ** 2) * expected[0]).all()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_are_no_numbers_reach_the_moments_of_their_set_alone(value: float) -> None:
    x = numbers(3, 1 << 17)
    x[1, 7] = value
    mean, var = normalization.moments_of_sets(x, 3)
    assert mean.isfinite().tolist() == var.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_that_do_not_vary_have_no_variance(dtype: torch.dtype) -> None:
    mean, var = normalization.moments_of_groups(torch.full((2, 4, 8), 0.5, dtype=dtype), 2)
    assert_close(mean, torch.full_like(mean, 0.5))
    assert (var >= 0).all()
    assert_close(var, torch.zeros_like(var), scale=1e-20)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_moments_are_applied_in_any_memory_format(memory_format: torch.memory_format) -> None:
    x = numbers(2, 6, 5, 7).contiguous(memory_format=memory_format)
    mean, var = numbers(2, 6, 1, 1, seed=1), numbers(2, 6, 1, 1, seed=2).square()
    weight, bias = numbers(6, 1, 1, seed=3), numbers(6, 1, 1, seed=4)
    plain = (x - mean) / (var + 1e-3).sqrt()
    assert_close(normalization.normalised(x, (mean, var), 1e-3), plain)
    assert_close(normalization.normalised(x, (mean, var), 1e-3, weight), plain * weight)
    assert_close(normalization.normalised(x, (mean, var), 1e-3, weight, bias), plain * weight + bias)


NORMS: dict[str, Callable[..., Any]] = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "group": lambda x, w, b: F.group_norm(x, 3, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, x.shape[2:]) * w.sum() + b.sum(),
}


def in_pieces(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    name, at = case
    with pytest.MonkeyPatch.context() as patch:
        pieces(patch, 10, 6)
        tensors = [numbers(3, 6, 5, 7), numbers(6, seed=1), numbers(6, seed=2)]
        whole = ("R",) * len(at)
        agree(mesh, NORMS[name], Sample(tensors, [at, whole, whole], [True] * 3))


def test_norms_whose_moments_are_found_in_pieces(pool: Pool) -> None:
    for mesh, places in {(4,): [(0,), (1,), (2,), (3,)], (2, 2): [(0, 2), (2, 3), (3, 3), (1, 2)]}.items():
        pool.run_cases(in_pieces, [(name, at) for name in NORMS for at in places], mesh=mesh)


def too_large(mesh: DeviceMesh, case: tuple[str, int]) -> None:
    """A variance that float32 has no number for: nothing is left of values then, or they are no numbers."""
    name, dim = case
    x, w, b = (numbers(*shape, seed=len(shape)).float() for shape in ((2, 6, 8, 16), (6,), (6,)))
    x *= 1e30
    expected = NORMS[name](x, w, b)
    found = NORMS[name](
        distribute_tensor(x, mesh, [Shard(dim)]), *(distribute_tensor(each, mesh, [Replicate()]) for each in (w, b))
    )
    torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)


def test_values_whose_squares_are_too_large(pool: Pool) -> None:
    pool.run_cases(too_large, [(name, dim) for name in NORMS for dim in (2, 3)], mesh=(2,))
