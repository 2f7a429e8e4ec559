"""What vmap is measured at: the same work by stock torch.func or convmesh, by a Python loop, and by Opacus' hooks."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import convmesh
from benchmarks.layers import LAYERS, OTHER_LAYERS, Layer
from convmesh import batching

PER_SAMPLE_BATCH, MEMBERS, MEMBER_BATCH = 16, 8, 8
Run = Callable[[], object]
Row = tuple[str, Callable[[], "Comparison"]]


@dataclass
class Comparison:
    """The same work in several ways. `mapped` is what both stock torch.func and convmesh run.

    `beside` is what all of them do beside convolutions, where that is known.
    """

    mapped: Run
    loop: Run
    opacus: Run | None = None
    beside: Run | None = None
    threads: int | None = None
    dtype: torch.dtype = torch.float32


def per_sample(layer: Layer) -> Comparison:
    x, w = layer.inputs(layer.batch or PER_SAMPLE_BATCH), layer.weights()
    y = torch.randn(layer.convolve(w, x).shape, dtype=layer.dtype)
    y = as_laid(y, lambda: vmap(layer.convolve, (None, 0))(w, x))

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (layer.convolve(w, x) * y).sum()

    one, mapped = grad(loss), vmap(grad(loss), (None, 0, 0))
    return Comparison(
        lambda: mapped(w, x, y),
        lambda: stacked([one(w, *sample) for sample in zip(x, y, strict=True)]),
        None if layer.transposed else opacus_run(layer.module(), lambda module: (module(x) * y).sum()),
        loss_alone(y),
        layer.threads,
        layer.dtype,
    )


def as_laid(y: Tensor, output: Callable[[], Tensor]) -> Tensor:
    """The same numbers, lying in memory as the output does of whoever runs, stock or convmesh: so does what a network
    has beside it."""
    return torch.empty_like(output()).copy_(y)


def stacked(results: Sequence[Tensor] | Sequence[tuple[Tensor, ...]]) -> object:
    """As vmap returns them."""
    if isinstance(results[0], Tensor):
        return torch.stack(results)  # type: ignore[arg-type]
    return tuple(map(torch.stack, zip(*results, strict=True)))


def loss_alone(y: Tensor) -> Run:
    """The losses of outputs that are there, and their gradients."""
    output, mapped = torch.ones_like(y), vmap(grad(lambda output, y: (output * y).sum()))
    return lambda: mapped(output, y)


def ensemble(layer: Layer, shared: bool, backward: bool) -> Comparison:
    w = layer.weights(MEMBERS)
    batch = layer.batch or MEMBER_BATCH
    x = layer.inputs(batch) if shared else layer.inputs(MEMBERS, batch)
    dim = None if shared else 0
    y = torch.randn(vmap(layer.convolve, (0, dim))(w, x).shape, dtype=layer.dtype)
    y = as_laid(y, lambda: vmap(layer.convolve, (0, dim))(w, x))

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (layer.convolve(w, x) * y).sum()

    def member(i: int) -> tuple[Tensor, ...]:
        inputs = x if shared else x[i]
        return (w[i], inputs, y[i]) if backward else (w[i], inputs)

    # Members with inputs of their own are as a rule inside a network, and pass a gradient on to them.
    one = grad(loss, 0 if shared else (0, 1)) if backward else layer.convolve
    mapped = vmap(one, (0, dim, 0) if backward else (0, dim))
    return Comparison(
        lambda: mapped(w, x, y) if backward else mapped(w, x),
        lambda: stacked([one(*member(i)) for i in range(MEMBERS)]),
        beside=loss_alone(y) if backward else None,
        threads=layer.threads,
        dtype=layer.dtype,
    )


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        straight = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if straight else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """ResNet-18 for 32x32 images, with group norm."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*width) for width in (*widths, (512, 512, 1))]
    stem = (nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(8, 64), nn.ReLU())
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def network() -> Comparison:
    model, x, y = resnet(), torch.randn(PER_SAMPLE_BATCH, 3, 32, 32), torch.randint(0, 10, (PER_SAMPLE_BATCH,))
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(some: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, some, (x.unsqueeze(0),)), y.unsqueeze(0))

    def one_by_one() -> object:
        leaves, samples = list(model.parameters()), zip(x.split(1), y.split(1), strict=True)
        return stacked([torch.autograd.grad(F.cross_entropy(model(each), label), leaves) for each, label in samples])

    return Comparison(
        lambda: (
            convmesh.per_sample_gradients(model, F.cross_entropy, x, y)
            if batching.installed()
            else vmap(grad(loss), (None, 0, 0))(parameters, x, y)
        ),
        one_by_one,
        opacus_run(resnet(), lambda module: F.cross_entropy(module(x), y, reduction="sum")),
    )


def opacus_run(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Run | None:
    if importlib.util.find_spec("opacus") is None:
        return None
    from opacus.grad_sample import GradSampleModule

    hooked = GradSampleModule(module, loss_reduction="sum")

    def run() -> None:
        hooked.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that its hooks also fire for inputs without a gradient
            loss(hooked).backward()

    return run


def rows_of(layers: Sequence[Layer]) -> Iterator[Row]:
    yield from ((f"per-sample gradients, {layer.name}", partial(per_sample, layer)) for layer in layers)
    for shared in (False, True):
        for backward in (False, True):
            inputs, way = "shared inputs" if shared else "own inputs", "gradients" if backward else "forward"
            kind = f"ensemble of {MEMBERS}, {inputs}, {way}"
            yield from ((f"{kind}, {layer.name}", partial(ensemble, layer, shared, backward)) for layer in layers)


# Rows by title: a name, and what makes the comparison.
LISTS: dict[str, tuple[Row, ...]] = {
    "the layers that a benchmark would take": (
        *rows_of(LAYERS),
        ("per-sample gradients, ResNet-18-like", network),
    ),
    "other layers": tuple(rows_of(OTHER_LAYERS)),
}
