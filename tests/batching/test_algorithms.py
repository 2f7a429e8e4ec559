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
        for algorithm in that_apply(vmap(function, dims), *args):
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
        assert_same(by(case.algorithm, vmap(function, case.dims), *args), want, terms)


def test_every_algorithm_is_forced() -> None:
    assert {algorithm for algorithm, _, _ in FORCED} == {each.name for each in ALGORITHMS}


def test_what_does_not_apply_cannot_be_forced() -> None:
    geometry, x, w, _, _ = layer("dense", False, 1)
    convolve = vmap(lambda x, w: aten.convolution(x, w, None, *geometry))
    with batching.force("pointwise"), pytest.raises(ValueError, match="pointwise is forced, but does not apply to the"):
        convolve(x, w)
    with batching.force("pointwise", "loop"):
        assert [each.algorithm.name for each in batching.explain(convolve, x, w)] == ["loop"]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: algorithm.name)
def test_force_takes_it_wherever_it_applies(algorithm: choice.Algorithm) -> None:
    def everything() -> None:
        for name in LAYERS:
            geometry, x, w, _, y = layer(name, False, 1)
            for dims in [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)]:
                args = [value if dim == 0 else value[0] for value, dim in zip((y, x, w), dims, strict=True)]
                vmap(lambda *a, g=geometry: aten.convolution_backward(*a, None, *g, [True] * 3)[:2], dims)(*args)

    with batching.force(algorithm.name, *FOLDS):
        decisions = batching.explain(everything)
    applicable = [decision for decision in decisions if algorithm.applies(decision.task)]
    assert applicable
    assert all(decision.algorithm is algorithm and decision.reason == "forced" for decision in applicable)


def test_patches_are_made_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, x, w, b, y = layer("dense", False, 2)
    sizes: list[int] = []
    make = patches.View.patches

    def noted(view: patches.View, image: Tensor) -> Tensor:
        made = make(view, image)
        sizes.append(made.numel() * made.element_size())
        return made

    per_sample = 4 * 6 * 2 * y.shape[-1] * y.shape[-2] * 8
    monkeypatch.setattr(patches, "WORKSPACE", 2 * per_sample)
    monkeypatch.setattr(patches.View, "patches", noted)
    with batching.force("unfold"):
        got = vmap(lambda x, w, b: aten.convolution(x, w, b, *geometry))(x, w, b)
    assert sizes == [2 * per_sample, per_sample]
    assert_same(got, loop_and_stack(lambda x, w, b: aten.convolution(x, w, b, *geometry), (0, 0, 0), x, w, b))


@pytest.mark.parametrize("workspace", [1, 2**20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "pointwise"])
def test_images_of_a_sample_multiplied_one_by_one(
    name: str, transposed: bool, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry, x, w, b, y = layer(name, transposed, 2)
    monkeypatch.setattr(patches, "WIDE", 1)
    monkeypatch.setattr(patches, "WORKSPACE", workspace)

    def output(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return aten.convolution(x, w, b, *geometry)

    def gradients(y: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return aten.convolution_backward(y, x, w, None, *geometry, [True, True, False])[:2]

    folded = x.transpose(0, 1).contiguous()  # samples within the batch, as a fold leaves them
    with batching.force("unfold"):
        assert_same(vmap(output)(x, w, b), loop_and_stack(output, (0, 0, 0), x, w, b))
        assert_same(vmap(output, (1, 0, None))(folded, w, b[0]), loop_and_stack(output, (0, 0, None), x, w, b[0]))
        assert_same(vmap(gradients)(y, x, w), loop_and_stack(gradients, (0, 0, 0), y, x, w))


def test_patches_of_one_sample_that_are_too_large_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    geometry, x, w, _, _ = layer("dense", False, 1)
    monkeypatch.setattr(patches, "WORKSPACE_LIMIT", 8)
    assert "unfold" not in that_apply(vmap(lambda x, w: aten.convolution(x, w, None, *geometry)), x, w)
