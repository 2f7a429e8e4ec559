"""Each algorithm in turn, for every product it serves: taken, right, and within its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as all_combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from convmesh import batching
from convmesh.batching import choice, patches
from convmesh.batching.choice import ALGORITHMS
from tests.batching.forcing import FOLDS, by, that_apply
from tests.batching.oracle import assert_same, loop_and_stack

aten = torch.ops.aten

# name -> (C, O, groups, kernel, padding); those with 3 x 3 taps take no steps
LAYERS = {
    "dense": (4, 6, 1, (3, 2), (1, 0)),
    "nine taps": (4, 6, 1, (3, 3), (1, 0)),
    "nine taps, grouped": (4, 6, 2, (3, 3), (0, 2)),
    "grouped": (4, 6, 2, (3, 2), (1, 0)),
    "depthwise": (4, 4, 4, (3, 2), (1, 0)),
    "pointwise": (4, 6, 1, (1, 1), (0, 0)),
    "pointwise, padded": (4, 6, 1, (1, 1), (1, 0)),
    "pointwise, grouped": (4, 6, 2, (1, 1), (0, 0)),
}


def layer(name: str, transposed: bool, N: int) -> tuple[tuple[object, ...], Tensor, Tensor, Tensor, Tensor]:
    """Geometry, x, w, b and y of three samples."""
    C, outputs, groups, kernel, padding = LAYERS[name]
    stride, dilation = ([1, 1], [1, 1]) if kernel == (3, 3) else ([2, 1], [1, 2])
    extra = [1, 0] if transposed and kernel != (3, 3) else [0, 0]
    geometry = (stride, padding, dilation, transposed, extra, groups)
    w = torch.randn(3, C, outputs // groups, *kernel) if transposed else torch.randn(3, outputs, C // groups, *kernel)
    x, b = torch.randn(3, N, C, 8, 7), torch.randn(3, outputs)
    y = torch.stack([aten.convolution(x[0], w[0], None, *geometry)] * 3)
    return geometry, *(value.double() for value in (x, w, b, torch.randn_like(y)))


# Winograd's algorithm is for float32 alone, whose rounding is so many times that of float64.
COARSER = 2.0**29


DIMS = [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 0, None), (0, None, 0), (None, 0, None)]
PRODUCTS = {"forward": (), "of the input": (True, False), "of the weight": (False, True), "of both": (True, True)}


@dataclass(frozen=True)
class Forced:
    """A product, or both gradients at once, to all of which the algorithm applies."""

    algorithm: str
    name: str
    transposed: bool
    N: int
    product: str
    dims: tuple[int | None, ...]

    def call(self) -> tuple[Callable[..., Any], list[Tensor]]:
        """What is mapped, and over what: (x, w, b), or (y, x, w)."""
        geometry, x, w, b, y = layer(self.name, self.transposed, self.N)
        mask = PRODUCTS[self.product]

        def output(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return aten.convolution(x, w, b, *geometry)

        def gradients(y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
            found = aten.convolution_backward(y, x, w, [y.shape[1]], *geometry, [*mask, True])
            return [each for each in found if each is not None]

        operands = (y, x, w) if mask else (x, w, b)
        args = [value if dim == 0 else value[0] for value, dim in zip(operands, self.dims, strict=True)]
        return (gradients if mask else output), args


def forced_cases() -> dict[tuple[str, str, bool], list[Forced]]:
    """By algorithm, layer and whether it is transposed: all that apply, and no others."""
    found: dict[tuple[str, str, bool], list[Forced]] = {}
    batching.install()
    for name, transposed, N, product, dims in all_combinations(LAYERS, (False, True), (1, 2), PRODUCTS, DIMS):
        function, args = Forced("", name, transposed, N, product, dims).call()
        single = that_apply(vmap(function, dims), *(each.float() for each in args))
        for algorithm in (*that_apply(vmap(function, dims), *args), *(["winograd"] if "winograd" in single else [])):
            case = Forced(algorithm, name, transposed, N, product, dims)
            found.setdefault((algorithm, name, transposed), []).append(case)
    batching.uninstall()
    return found


FORCED = forced_cases()


@pytest.mark.parametrize("which", FORCED, ids=lambda which: f"{which[0]}-{which[1]}{'-transposed' * which[2]}")
def test_forced(which: tuple[str, str, bool]) -> None:
    for case in FORCED[which]:
        function, args = case.call()
        want, terms = (loop_and_stack(function, case.dims, *some) for some in (args, [each.abs() for each in args]))
        if case.algorithm == "winograd":
            args, terms = [each.float() for each in args], [COARSER * each for each in as_list(terms)]
            got = [each.double() for each in as_list(by("winograd", vmap(function, case.dims), *args))]
            assert_same(got, as_list(want), terms)
        else:
            assert_same(by(case.algorithm, vmap(function, case.dims), *args), want, terms)


def as_list(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_every_algorithm_is_forced() -> None:
    assert {algorithm for algorithm, _, _ in FORCED} == {each.name for each in ALGORITHMS}


def test_what_does_not_apply_cannot_be_forced() -> None:
    geometry, x, w, _, _ = layer("dense", False, 1)
    convolve = vmap(lambda x, w: aten.convolution(x, w, None, *geometry))
    with batching.force("unfold"), pytest.raises(ValueError, match="unfold is forced, but does not apply to the"):
        convolve(x, w)
    with batching.force("unfold", "loop"):
        assert [each.algorithm.name for each in batching.explain(convolve, x, w)] == ["loop"]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_force_takes_it_wherever_it_applies(algorithm: choice.Algorithm) -> None:
    def everything() -> None:
        for name in LAYERS:
            geometry, *tensors = layer(name, False, 1)
            x, w, _, y = (each.float() for each in tensors)
            for dims in [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)]:
                args = [value if dim == 0 else value[0] for value, dim in zip((y, x, w), dims, strict=True)]
                vmap(lambda *a, g=geometry: aten.convolution_backward(*a, None, *g, [True] * 3)[:2], dims)(*args)

    with batching.force(algorithm.name, *FOLDS):
        decisions = batching.explain(everything)
    applicable = [decision for decision in decisions if algorithm.applies(decision.task)]
    assert applicable
    assert all(decision.algorithm is algorithm and decision.reason == "forced" for decision in applicable)


def test_patches_are_made_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, x, w, _, y = layer("dense", False, 2)
    sizes: list[int] = []
    make = patches.View.patches

    def noted(view: patches.View, image: Tensor) -> Tensor:
        made = make(view, image)
        sizes.append(made.numel() * made.element_size())
        return made

    def gradient(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return aten.convolution_backward(y, x, w, None, *geometry, [False, True, False])[1]

    per_sample = 4 * 6 * 2 * y.shape[-1] * y.shape[-2] * 8
    monkeypatch.setattr(patches, "WORKSPACE", 2 * per_sample)
    monkeypatch.setattr(patches.View, "patches", noted)
    with batching.force("unfold"):
        got = vmap(gradient)(y, x, w)
    assert sizes == [2 * per_sample, per_sample]
    assert_same(got, loop_and_stack(gradient, (0, 0, 0), y, x, w))


@pytest.mark.parametrize("wanted", ["forward", "of both"])
def test_operands_in_any_layout(wanted: str) -> None:
    """Samples within the batch, channels innermost, parts of larger tensors; the first call prepares the second."""
    case = Forced("direct", "dense", False, 2, wanted, (0, 0, 0))
    function, args = case.call()
    want = loop_and_stack(function, (0, 0, 0), *args)
    for lay in (
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: t.movedim(2, -1).contiguous().movedim(-1, 2) if t.ndim > 3 else t,
        lambda t: torch.stack([t, t + 1], -1)[..., 0],
        lambda t: torch.cat([t - 1, t, t + 1])[len(t) : 2 * len(t)],
    ):
        laid = [lay(each) for each in args]
        for _ in range(2):
            assert_same(vmap(function)(*laid), want)
        assert_same(by("direct", vmap(function), *laid), want)
