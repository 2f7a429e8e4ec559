"""Every rule against loop-and-stack, over geometry, groups, what is mapped and where, and every algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from tests.batching.cases import Case, Dims, cases, mapped_dims
from tests.batching.forcing import by, that_apply
from tests.batching.oracle import assert_same, loop_and_stack

aten = torch.ops.aten
sweep = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@sweep
@given(cases(), st.data())
def test_forward(case: Case, data: st.DataObject) -> None:
    shapes = [shape for shape in (case.x, case.w, case.b) if shape is not None]
    dims = data.draw(mapped_dims(*shapes))
    args = [case.tensor(shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
    out_dim = data.draw(st.integers(0, len(case.y)))

    def one(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return aten.convolution(x, w, b, *case.geometry.arguments)

    got = by_any(data, vmap(one, dims, out_dim), *args).movedim(out_dim, 0)
    compare(got, one, dims, *args)


@sweep
@given(cases(), st.data())
def test_backward(case: Case, data: st.DataObject) -> None:
    shapes = (case.y, case.x, case.w)
    dims = data.draw(mapped_dims(*shapes))
    args = [case.tensor(shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
    mask = data.draw(st.tuples(*[st.booleans()] * 3).filter(any))

    def one(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        bias = list(case.y[1:2])
        gradients = aten.convolution_backward(g, x, w, bias, *case.geometry.arguments, mask)
        assert [gradient is not None for gradient in gradients] == list(mask)
        return tuple(gradient for gradient in gradients if gradient is not None)

    compare(by_any(data, vmap(one, dims), *args), one, dims, *args)


def by_any(data: st.DataObject, function: Callable[..., Any], *args: Tensor) -> Any:
    """By an algorithm that applies to all of it, or by what is chosen, which is as a rule torch's own."""
    name = data.draw(st.sampled_from([None, None, *that_apply(function, *args)]))
    return function(*args) if name is None else by(name, function, *args)


def compare(got: Any, one: Callable[..., Any], dims: Dims, *args: Tensor) -> None:
    """Element by element: of absolute values, it gives the size of the terms that each of them sums up."""
    terms = loop_and_stack(one, dims, *(arg.abs() for arg in args))
    assert_same(got, loop_and_stack(one, dims, *args), terms)


@pytest.mark.parametrize("conv", [F.conv2d, F.conv_transpose2d])
def test_samples_without_a_batch_dimension(conv) -> None:
    x, w = torch.randn(3, 4, 6, 5).double(), torch.randn(4, 4, 3, 3).double()
    assert_same(vmap(lambda x: conv(x, w))(x), loop_and_stack(lambda x: conv(x, w), (0,), x))


@pytest.mark.parametrize("sizes", [(0, 2), (2, 0), (1, 1), (0, 0)])
def test_nested_maps_of_no_and_of_one_sample(sizes: tuple[int, int]) -> None:
    x, w = torch.randn(*sizes, 1, 2, 5, 5).double(), torch.randn(sizes[1], 4, 2, 3, 3).double()
    got = vmap(vmap(F.conv2d), (0, None))(x, w)
    assert got.shape == (*sizes, 1, 4, 3, 3)
    gradients = vmap(vmap(grad(lambda w, x: F.conv2d(x, w).square().sum())), (None, 0))(w, x)
    assert gradients.shape == (sizes[0], *w.shape)
    for i in range(sizes[0]):
        for j in range(sizes[1]):
            assert_same(got[i, j], F.conv2d(x[i, j], w[j]))


def test_one_number_stands_for_all_spatial_dimensions() -> None:
    x, w = torch.randn(3, 1, 2, 7, 7).double(), torch.randn(4, 2, 3, 3).double()

    def one(x: Tensor) -> Tensor:
        return aten.convolution(x, w, None, [2], [1], [1], False, [0], 1)

    assert_same(vmap(one)(x), loop_and_stack(one, (0,), x))


def test_a_gradient_by_no_samples_is_zero() -> None:
    w = torch.randn(4, 2, 3, 3, requires_grad=True)
    vmap(lambda x: F.conv2d(x, w))(torch.randn(0, 1, 2, 5, 5)).sum().backward()
    assert_same(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)])
def test_what_does_not_fit_gets_the_words_of_torch(dims: tuple[int | None, int | None]) -> None:
    x, w = torch.randn(1, 5, 8, 8), torch.randn(4, 3, 3, 3)
    with pytest.raises(RuntimeError) as stock:
        F.conv2d(x, w)
    pairs = zip((x, w), dims, strict=True)
    batched = [value.repeat(2, 1, 1, 1, 1) if dim == 0 else value for value, dim in pairs]
    with pytest.raises(RuntimeError, match="for each of 2 samples: vmap maps dimension 0 of") as ours:
        vmap(F.conv2d, dims)(*batched)
    assert str(ours.value).startswith(str(stock.value))


@pytest.mark.parametrize(
    ("x", "w", "b", "message"),
    [
        ((2, 5, 5), (4, 2, 7, 7), (4,), "Kernel size can't be greater"),
        ((2, 5, 5), (4, 2, 3, 3), (1,), "expected bias to be"),
        ((2, 5, 5), (4, 2, 3), (4,), "expected stride to be a single integer"),
    ],
)
def test_bad_samples(x: tuple[int, ...], w: tuple[int, ...], b: tuple[int, ...], message: str) -> None:
    image, kernel, biases = torch.randn(x), torch.randn(w), torch.randn(3, *b)
    with pytest.raises(RuntimeError, match=message):
        vmap(lambda b: F.conv2d(image, kernel, b))(biases)


def test_a_gradient_of_another_shape_is_refused() -> None:
    g, x, w = torch.randn(2, 1, 4, 3, 3), torch.randn(1, 2, 8, 8), torch.randn(4, 2, 3, 3)
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    words = r"\[1, 4, 3, 3\], but the output is .* \[1, 4, 6, 6\] \(for each of 2 samples: vmap maps dimension 0 of"
    with pytest.raises(RuntimeError, match=words):
        vmap(lambda g: aten.convolution_backward(g, x, w, None, *plain, [True, False, False])[0])(g)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_numbers_of_several_dtypes_are_refused(odd: int) -> None:
    """Kernels of our own would read the bytes of one as those of another."""
    tensors = [torch.randn(3, 2, 8, 9, 9), torch.randn(3, 8, 8, 3, 3), torch.randn(3, 8)]
    tensors[odd] = tensors[odd].double()
    with pytest.raises(RuntimeError, match="same"):
        F.conv2d(*(each[0] for each in tensors))
    with pytest.raises(RuntimeError, match="same"):
        vmap(F.conv2d)(*tensors)
    gradient, x, w = torch.randn(3, 2, 8, 7, 7), torch.randn(3, 2, 8, 9, 9), torch.randn(3, 8, 8, 3, 3)
    operands = [each.double() if i == odd else each for i, each in enumerate((gradient, x, w))]
    plain = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    with pytest.raises(RuntimeError, match="for each of 3 samples"):
        vmap(lambda g, x, w: aten.convolution_backward(g, x, w, None, *plain, [True, True, False])[:2])(*operands)


@pytest.mark.parametrize(
    ("x", "w", "padding", "transposed"),
    [((2, 0, 5, 5), (4, 0, 3, 3), 0, False), ((0, 2, 2, 5), (2, 3, 3, 3), (2, 1), True)],
    ids=["no channels", "no images, of no size"],
)
def test_what_torch_computes_against_its_own_formula(
    x: tuple[int, ...], w: tuple[int, ...], padding: int | tuple[int, int], transposed: bool
) -> None:
    """Left to its own rule: the output has other sizes than those of a convolution."""
    convolve = F.conv_transpose2d if transposed else F.conv2d
    args = torch.randn(3, *x).double(), torch.randn(3, *w).double()

    def gradients(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        got: tuple[Tensor, Tensor] = grad(lambda x, w: convolve(x, w, padding=padding).sum(), (0, 1))(x, w)
        return got

    assert_same(vmap(gradients)(*args), loop_and_stack(gradients, (0, 0), *args))
