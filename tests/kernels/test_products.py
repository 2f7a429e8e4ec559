"""The compiled products against torch's operators, one sample at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convmesh import kernels
from convmesh.geometry import Convolution

TOLERANCE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float64: {"rtol": 1e-12, "atol": 1e-12}}


def layer(
    geometry: Convolution, samples: int, images: int, channels: tuple[int, int], size: list[int], kernel: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Images, kernels and responses, with as many channels to a group."""
    inputs, outputs = channels
    x = torch.randn(samples, images, inputs * geometry.groups, *size, dtype=torch.float64)
    w = torch.randn(samples, outputs * geometry.groups, inputs, *kernel, dtype=torch.float64)
    y = torch.randn(samples, images, w.shape[1], *geometry.output_size(size, kernel), dtype=torch.float64)
    return x, w, y


def expected(geometry: Convolution, x: Tensor, w: Tensor, y: Tensor) -> Iterator[tuple[str, Tensor]]:
    samples = list(zip(x, w, y, strict=True))
    forward = [torch.ops.aten.convolution(one, other, None, *geometry.arguments) for one, other, _ in samples]
    yield "response", torch.stack(forward)
    for wanted, mask in (("image", (True, False, False)), ("kernel", (False, True, False))):
        gradients = [
            torch.ops.aten.convolution_backward(g, one, other, None, *geometry.arguments, mask)
            for one, other, g in samples
        ]
        yield wanted, torch.stack([each[mask.index(True)] for each in gradients])


def algorithms(geometry: Convolution, kernel: torch.Size) -> list[str]:
    """Those that can do it."""
    spaced = {*geometry.stride, *geometry.dilation} != {1}
    too_far = any(padding >= taps for padding, taps in zip(geometry.padding, kernel, strict=True))
    return ["direct"] if spaced or too_far or kernel[-2:] != (3, 3) else ["direct", "winograd"]


def compare(geometry: Convolution, x: Tensor, w: Tensor, y: Tensor, threads: int = 2) -> None:
    for by in algorithms(geometry, w.shape[3:]):
        compare_by(by, geometry, x, w, y, threads)


def compare_by(by: str, geometry: Convolution, x: Tensor, w: Tensor, y: Tensor, threads: int) -> None:
    for wanted, right in expected(geometry, x, w, y):
        for dtype, tolerance in TOLERANCE.items():
            given = {"image": x.to(dtype), "kernel": w.to(dtype), "response": y.to(dtype)}
            found = given[wanted] = torch.full_like(right, torch.nan, dtype=dtype)
            kernels.compute(kernels.Product(wanted, len(x), geometry, by), kernels.Steps(**given), threads)
            scale = float(right.abs().max()) or 1.0
            torch.testing.assert_close(found.double() / scale, right / scale, **tolerance)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Convolution, Tensor, Tensor, Tensor]:
    dims = draw(st.integers(1, 3))

    def some(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(dims)]

    kernel, dilation, padding = some(1, 4), some(1, 2), some(0, 4)
    least = [max(1, (k - 1) * d + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = [draw(st.integers(low, low + 10)) for low in least]
    geometry = Convolution(
        tuple(some(1, 3)), tuple(padding), tuple(dilation), False, (0,) * dims, draw(st.integers(1, 3))
    )
    channels = draw(st.sampled_from([1, 2, 3, 8, 17])), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 9, 16, 17, 33]))
    torch.manual_seed(draw(st.integers(0, 99)))
    return geometry, *layer(geometry, draw(st.integers(1, 3)), draw(st.integers(1, 3)), channels, size, kernel)


@given(layers(), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_any_geometry(case: tuple[Convolution, Tensor, Tensor, Tensor], threads: int) -> None:
    compare(*case, threads)


@st.composite
def layers_of_nine_taps(draw: st.DrawFn) -> tuple[Convolution, Tensor, Tensor, Tensor]:
    depth = draw(st.lists(st.integers(1, 3), max_size=1))
    kernel = [*depth, 3, 3]
    padding = [draw(st.integers(0, taps - 1)) for taps in kernel]
    size = [draw(st.integers(max(1, k - 2 * p), 12)) for k, p in zip(kernel, padding, strict=True)]
    one = (1,) * len(kernel)
    geometry = Convolution(one, tuple(padding), one, False, (0,) * len(kernel), draw(st.integers(1, 2)))
    channels = draw(st.sampled_from([1, 3, 8, 17, 40])), draw(st.sampled_from([1, 3, 8, 16, 17, 33, 40]))
    torch.manual_seed(draw(st.integers(0, 99)))
    return geometry, *layer(geometry, draw(st.integers(1, 3)), draw(st.integers(1, 3)), channels, size, kernel)


@given(layers_of_nine_taps(), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_nine_taps(case: tuple[Convolution, Tensor, Tensor, Tensor], threads: int) -> None:
    compare_by("winograd", *case, threads)


PLAIN = Convolution((1, 1), (1, 1), (1, 1), False, (0, 0), 1)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [2, 3, 5, 7])
@pytest.mark.parametrize("groups", [1, 3, 8, 9, 17])
def test_one_channel_to_a_group(groups: int, kernel: int, stride: int) -> None:
    geometry = replace(PLAIN, groups=groups, stride=(stride, stride), padding=(kernel // 2, 1))
    compare(geometry, *layer(geometry, 2, 3, (1, 1), [9, 21], [3, kernel]))


def test_more_images_than_fit_at_once() -> None:
    """And so does more depth: sums go on where those of other images left them."""
    compare(PLAIN, *layer(PLAIN, 2, 5, (40, 20), [36, 35], [3, 3]))
    compare(PLAIN, *layer(PLAIN, 1, 4, (40, 70), [51, 65], [3, 3]))


def test_more_columns_than_are_made_beforehand() -> None:
    """Of more images than fit at once, too, and in several blocks."""
    compare_by("winograd", PLAIN, *layer(PLAIN, 1, 5, (136, 130), [20, 19], [3, 3]), threads=1)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_samples_images_and_channels_lie_anyhow(order: tuple[int, ...]) -> None:
    tensors = layer(PLAIN, 3, 2, (5, 6), [6, 7], [3, 3])

    def laid(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
        back = [dims.index(dim) for dim in range(len(dims))]
        rest = range(len(dims), tensor.dim())
        return tensor.permute(*dims, *rest).contiguous().permute(*back, *rest)

    x, w, y = tensors
    kernel_order = tuple(dim for dim in order if dim < 2)
    compare(PLAIN, laid(x, order), laid(w, kernel_order), laid(y, order))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [(5, 6), (3, 17), (20, 9)])
def test_one_sample_for_all(channels: tuple[int, int], groups: int) -> None:
    """Columns of samples that read the same are side by side, and a block may have those of several."""
    geometry = replace(PLAIN, groups=groups)
    x, w, y = layer(geometry, 5, 2, channels, [6, 7], [3, 3])
    compare(geometry, x[:1].expand_as(x), w, y)
    compare(geometry, x, w[:1].expand_as(w), y)
    compare(geometry, x, w, y[:1].expand_as(y))
    bias, right = torch.randn(5, w.shape[1], dtype=torch.float64), dict(expected(geometry, x[:1].expand_as(x), w, y))
    for by in algorithms(geometry, w.shape[3:]):
        found = torch.full_like(y, torch.nan)
        steps = kernels.Steps(x[:1].expand_as(x), w, found, bias)
        kernels.compute(kernels.Product("response", 5, geometry, by), steps, 2)
        torch.testing.assert_close(found, right["response"] + bias[:, None, :, None, None])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (17, 20), (40, 9)])
@pytest.mark.parametrize("size", [[4, 4], [5, 7], [13, 13], [1, 40]])
def test_one_tap(size: list[int], channels: tuple[int, int], order: tuple[int, ...]) -> None:
    """Operands are read where they are, and nothing behind them."""
    geometry = replace(PLAIN, padding=(0, 0), groups=2)
    tensors = layer(geometry, 2, 3, channels, size, [1, 1])
    x, y = (each.permute(*order, 2, 3, 4).contiguous().permute(*order, 2, 3, 4) for each in (tensors[0], tensors[2]))
    compare(geometry, x, tensors[1], y)


@pytest.mark.parametrize("wanted", ["response", "image"])
@pytest.mark.parametrize("channels", [(3, 2), (17, 20), (1, 1)])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_bias(channels: tuple[int, int], wanted: str, stride: int) -> None:
    geometry = replace(PLAIN, groups=2, stride=(stride, stride))
    given = dict(zip(("image", "kernel", "response"), layer(geometry, 2, 3, channels, [6, 9], [3, 3]), strict=True))
    right = dict(expected(geometry, *given.values()))[wanted]
    bias = torch.randn(2, right.shape[2], dtype=torch.float64)
    for by in algorithms(geometry, given["kernel"].shape[3:]):
        given[wanted] = torch.full_like(right, torch.nan)
        kernels.compute(kernels.Product(wanted, 2, geometry, by), kernels.Steps(**given, bias=bias), 2)
        torch.testing.assert_close(given[wanted], right + bias[:, None, :, None, None])


@pytest.mark.parametrize("outputs", [1, 3, 8, 40])
@pytest.mark.parametrize("by", ["direct", "winograd"])
def test_what_is_not_finite_stays_in_its_channel(by: str, outputs: int) -> None:
    """Vectors may end in numbers of others, which are not added up."""
    x, w, y = layer(PLAIN, 2, 3, (5, outputs), [6, 11], [3, 3])
    for corner in (0, -1):
        x[1, 1, 2, corner, corner] = torch.inf
    found = torch.full_like(w, torch.nan)
    kernels.compute(kernels.Product("kernel", 2, PLAIN, by), kernels.Steps(x, found, y), 2)
    assert not found[1, :, 2].isfinite().all()
    found[1, :, 2] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("wanted", ["response", "image", "kernel"])
def test_winograd_rounds_little_more(wanted: str) -> None:
    """Its errors, in float32, are those of numbers of about twice the size."""
    tensors = layer(PLAIN, 2, 4, (64, 64), [16, 16], [3, 3])
    right = dict(expected(PLAIN, *tensors))[wanted]
    given = dict(zip(("image", "kernel", "response"), (each.float() for each in tensors), strict=True))
    errors = {}
    for by in ("direct", "winograd"):
        given[wanted] = torch.empty_like(right, dtype=torch.float32)
        kernels.compute(kernels.Product(wanted, 2, PLAIN, by), kernels.Steps(**given), 2)
        errors[by] = float((given[wanted] - right).square().mean().sqrt() / right.square().mean().sqrt())
    assert errors["winograd"] < 4 * errors["direct"]
    assert errors["winograd"] < 1e-6


@pytest.mark.parametrize("by", ["direct", "winograd"])
def test_threads_do_not_change_a_bit(by: str) -> None:
    x, w, y = layer(PLAIN, 2, 2, (20, 70), [6, 7], [3, 3])
    results = []
    for threads in (1, 2, 3):
        found = torch.empty_like(y)
        kernels.compute(kernels.Product("response", 2, PLAIN, by), kernels.Steps(x, w, found), threads)
        results.append(found)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
