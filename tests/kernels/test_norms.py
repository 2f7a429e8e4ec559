"""The compiled passes of norms: right to rounding, however many values there are, and wherever they lie."""

from __future__ import annotations

import math

import pytest
import torch

from convmesh.kernels import library
from convmesh.kernels.norms import Linear

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def numbers(sets: int, count: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(sets, count, dtype=torch.float64, generator=generator).to(dtype)


def right(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, by two passes over the whole, with sums that are rounded once."""
    mean = means(x.double())
    return mean, means((x.double() - mean[:, None]).square())


def means(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([math.fsum(row) / len(row) for row in x.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("count", [1, 2, 7, 32, 100, 4096, 4097, 10000, 300001])
@pytest.mark.parametrize("offset", [0.0, 3.0, 1e3, 1e5])
def test_any_number_of_values_anywhere(count: int, offset: float, dtype: torch.dtype) -> None:
    x = numbers(3, count, dtype) + offset
    mean, variance = library.moments(x, 3)[0]
    expected_mean, expected_variance = right(x)
    assert ((mean - expected_mean).abs() <= EPS[dtype] * (offset + 1)).all()
    # A deviation is known to as much as a value is, and many of them to little more than that.
    assert ((variance - expected_variance).abs() <= 8 * EPS[dtype] * expected_variance).all()


def test_values_that_do_not_vary_have_no_variance() -> None:
    for value in (0.0, 0.1, -1e6):
        mean, variance = library.moments(torch.full((2, 5000), value), 2)[0]
        assert mean.tolist() == pytest.approx([value] * 2, rel=1e-7)
        assert variance.tolist() == [0, 0]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("count", [1, 50, 9000])
def test_values_that_are_no_numbers_reach_their_set_alone(value: float, count: int) -> None:
    x = numbers(3, count, torch.float32)
    x[1, count // 2] = value
    mean, variance = library.moments(x, 3)[0]
    assert mean.isfinite().tolist() == variance.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("scale", [1e-18, 1e-14, 1e14, 1e18])
def test_small_and_large_values(scale: float) -> None:
    x = numbers(2, 9000, torch.float32) * scale
    mean, variance = library.moments(x, 2)[0]
    expected_mean, expected_variance = right(x)
    torch.testing.assert_close(mean.double(), expected_mean, rtol=0, atol=1e-6 * scale)
    torch.testing.assert_close(variance.double(), expected_variance, rtol=1e-6, atol=0)


def test_threads_do_not_change_a_bit() -> None:
    x, threads = numbers(5, 100_001, torch.float32), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(library.moments(x, 5))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


COUNTS = [1, 2, 7, 32, 100, 4097, 30001]


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_backward(count: int, dtype: torch.dtype) -> None:
    g, x = numbers(3, count, dtype), 10 + numbers(3, count, dtype).flip(1)
    mean, rstd = torch.tensor([[9.0, 10.0, 11.0], [0.5, 1.0, 2.0]], dtype=dtype)
    products, plain = library.sums(g, x, (mean, rstd))
    terms = g.double() * (x.double() - mean[:, None]) * rstd[:, None]
    for found, summed in ((plain, g.double()), (products, terms)):
        scale = summed.abs().sum(1)  # what rounding is relative to
        assert ((found - count * means(summed)).abs() <= 16 * EPS[dtype] * scale).all()


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("count", [*COUNTS, 3 << 18])  # the last is written past the caches
@pytest.mark.parametrize("with_gradient", [True, False])
def test_linear_functions(count: int, with_gradient: bool, dtype: torch.dtype) -> None:
    """Of four sets with coefficients for two, that do not begin where a line of the cache does."""
    g, x = numbers(4, count, dtype), numbers(1, 4 * count + 1, dtype)[0, 1:].view(4, count)
    linear = Linear(*numbers(4, 2, dtype))
    found = library.combined(x, g if with_gradient else None, linear, 4)
    mean, by_input, added, by_gradient = (numbers.double().repeat(2)[:, None] for numbers in linear)
    expected = (x.double() - mean) * by_input + added + (g.double() * by_gradient if with_gradient else 0)
    terms = expected.abs() + (x.double().abs() + mean.abs()) * by_input.abs() + added.abs()
    assert ((found - expected).abs() <= 8 * EPS[dtype] * (terms + g.double().abs() * by_gradient.abs())).all()
