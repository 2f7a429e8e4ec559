"""vmap over convolutions: stock torch.func, a Python loop, Opacus where there is one, and convmesh.

The candidates take turns, and each runs once before it is timed, as in the steps of a training; times are medians in
milliseconds. The ratio is stock / convmesh: above 1 convmesh is faster. Much of stock's time for large results is that
of memory which it gets anew in each call.
Opacus is there if it is installed: `pip install -e .[opacus]`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.layers import LAYERS, OTHER_LAYERS, Layer
from benchmarks.measure import interleave, timed
from convmesh import batching
from convmesh.process_memory import peak_memory
from tests.harness import Pool

PER_SAMPLE_BATCH, MEMBERS, MEMBER_BATCH = 16, 8, 8
Run = Callable[[], object]


@dataclass
class Comparison:
    """The same work in several ways. `mapped` is what both stock torch.func and convmesh run."""

    name: str
    mapped: Run
    loop: Run
    opacus: Run | None = None
    threads: int = 2


def per_sample(layer: Layer) -> Comparison:
    x, w = layer.inputs(layer.batch or PER_SAMPLE_BATCH), layer.weights()
    y = torch.randn_like(layer.convolve(w, x))

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (layer.convolve(w, x) * y).sum()

    one, mapped = grad(loss), vmap(grad(loss), (None, 0, 0))
    return Comparison(
        f"per-sample gradients, {layer.name}",
        lambda: mapped(w, x, y),
        lambda: torch.stack([one(w, *sample) for sample in zip(x, y, strict=True)]),
        None if layer.transposed else opacus_run(layer.module(), lambda module: (module(x) * y).sum()),
        layer.threads,
    )


def ensemble(layer: Layer, shared: bool, backward: bool) -> Comparison:
    w = layer.weights(MEMBERS)
    batch = layer.batch or MEMBER_BATCH
    x = layer.inputs(batch) if shared else layer.inputs(MEMBERS, batch)
    dim = None if shared else 0
    y = torch.randn_like(vmap(layer.convolve, (0, dim))(w, x))

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return (layer.convolve(w, x) * y).sum()

    def member(i: int) -> tuple[Tensor, ...]:
        inputs = x if shared else x[i]
        return (w[i], inputs, y[i]) if backward else (w[i], inputs)

    # Members with inputs of their own are as a rule inside a network, and pass a gradient on to them.
    one = grad(loss, 0 if shared else (0, 1)) if backward else layer.convolve
    mapped = vmap(one, (0, dim, 0) if backward else (0, dim))
    args = (w, x, y) if backward else (w, x)
    inputs, way = "shared inputs" if shared else "own inputs", "gradients" if backward else "forward"
    return Comparison(
        f"ensemble of {MEMBERS}, {inputs}, {way}, {layer.name}",
        lambda: mapped(*args),
        lambda: [one(*member(i)) for i in range(MEMBERS)],
        threads=layer.threads,
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

    def one_by_one() -> list[tuple[Tensor, ...]]:
        leaves = list(model.parameters())
        return [torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), leaves) for i in range(len(x))]

    return Comparison(
        "per-sample gradients, ResNet-18-like",
        lambda: (
            batching.per_sample_gradients(model, F.cross_entropy, x, y)
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


@contextmanager
def rules(wanted: bool) -> Iterator[None]:
    """With our rules or torch's, warm: dispatch is slow at the first call after they were exchanged."""
    (batching.install if wanted else batching.uninstall)()
    vmap(grad(lambda w, x: F.conv1d(x, w).sum()))(torch.ones(2, 1, 1, 1), torch.ones(2, 1, 1, 1))
    yield
    batching.uninstall()


def candidates(comparison: Comparison) -> dict[str, tuple[Run, bool]]:
    """What to run, and whether with our rules."""
    runs = {"stock": (comparison.mapped, False), "loop": (comparison.loop, False)}
    if comparison.opacus is not None:
        runs["opacus"] = (comparison.opacus, False)
    return {**runs, "convmesh": (comparison.mapped, True)}


def measure(comparison: Comparison, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median milliseconds, and megabytes of peak memory above what was held before."""
    torch.set_num_threads(comparison.threads)
    runs = candidates(comparison)
    memory = {}
    for name, (run, ours) in runs.items():
        with rules(ours):
            run()
            memory[name] = peak_memory(run) / 1e6

    def turn(run: Run, ours: bool) -> float:
        with rules(ours):
            run()
            return 1e3 * timed(run)

    return interleave({name: partial(turn, *entry) for name, entry in runs.items()}, rounds), memory


def comparisons() -> Iterator[Callable[[], Comparison]]:
    """Made one at a time, since some hold a lot of memory."""
    yield from each_kind(LAYERS)
    yield network


def other_comparisons() -> Iterator[Callable[[], Comparison]]:
    return each_kind(OTHER_LAYERS)


def each_kind(layers: Sequence[Layer]) -> Iterator[Callable[[], Comparison]]:
    yield from (partial(per_sample, layer) for layer in layers)
    for shared in (False, True):
        for backward in (False, True):
            yield from (partial(ensemble, layer, shared, backward) for layer in layers)


def number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def run(pool: Pool, console: Console, rounds: int) -> None:
    """In this process: no rank takes part."""
    pool.kill()
    torch.manual_seed(0)
    report("the layers that a benchmark would take", comparisons(), console, rounds)
    report("layers that the prices were not fitted on", other_comparisons(), console, rounds)


def report(title: str, makers: Iterator[Callable[[], Comparison]], console: Console, rounds: int) -> None:
    names = ("stock", "loop", "opacus", "convmesh")
    table = Table("", title=f"{title}: milliseconds (peak MB), torch {torch.__version__}")
    for heading in (*names, "stock / convmesh"):
        table.add_column(heading, justify="right")
    results = []
    for make in track(list(makers), description="vmapped convolutions", console=console):
        comparison = make()
        times, memory = measure(comparison, rounds)
        results.append((comparison.name, times))
        cells = [f"{number(times[name])} ({number(memory[name])})" if name in times else "" for name in names]
        table.add_row(comparison.name, *cells, f"{times['stock'] / times['convmesh']:.2f}")
    console.print(table)
    console.print(summary(results))


SMALL_AND_WIDE = ("256->256 8x8 k3", "512->512 4x4 k3")


def kind_of(name: str) -> str:
    return next((name[: name.index(way) + len(way)] for way in ("forward", "gradients") if way in name), name)


def summary(results: Sequence[tuple[str, Mapping[str, float]]]) -> Table:
    """How many times as fast as the others convmesh is, by kind of work."""
    table = Table("others / convmesh", title="geometric mean (least)")
    for heading in ("cases", "stock", "loop", "opacus"):
        table.add_column(heading, justify="right")
    kinds = {"all": list(results)}
    if small := [result for result in results if result[0].endswith(SMALL_AND_WIDE)]:
        kinds["small images, wide layers"] = small
    for name, times in results:
        kinds.setdefault(kind_of(name), []).append((name, times))
    for kind, members in kinds.items():
        cells = []
        for other in ("stock", "loop", "opacus"):
            ratios = [times[other] / times["convmesh"] for _, times in members if other in times]
            cells.append(f"{geometric_mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "")
        table.add_row(kind, str(len(members)), *cells)
    return table
