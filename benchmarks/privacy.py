"""A step of DP-SGD by Opacus' hooks, by its ghost clipping as it is and with convmesh's norms, and by convmesh alone.

Every candidate has a process of its own, and does all of a step: forward, clipping, noise, update. They take turns;
times are medians. Memory is the peak of the first step above what was held before it. Opacus must be installed.
`--only U-Net` takes the networks that have this in their name. With `--threads 1` times are of the processor, which
others on a machine disturb less.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import convmesh
from benchmarks.mapped import resnet
from benchmarks.measure import interleave, timed, undisturbed
from benchmarks.turns import Contenders
from convmesh import batching
from convmesh.process_memory import peak_memory
from tests.harness import Pool

Step = Callable[[], object]
MAX_NORM = 1.0


class UNet(nn.Module):
    """Four levels, two convolutions on either way of each, group norm."""

    def __init__(self, classes: int = 4, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.entry = self.convs(1, widths[0])
        self.down = nn.ModuleList(nn.Conv2d(a, b, 2, stride=2) for a, b in pairs)
        self.before = nn.ModuleList(self.convs(b, b) for _, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairs)
        self.after = nn.ModuleList(self.convs(2 * a, a) for a, _ in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)

    @staticmethod
    def convs(a: int, b: int) -> nn.Sequential:
        first, second = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        return nn.Sequential(first, nn.GroupNorm(8, b), nn.ReLU(), second, nn.GroupNorm(8, b), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.entry(x)]
        for down, convs in zip(self.down, self.before, strict=True):
            kept.append(convs(down(kept[-1])))
        y = kept.pop()
        for up, convs in zip(reversed(self.up), reversed(self.after), strict=True):
            y = convs(torch.cat([kept.pop(), up(y)], 1))
        return self.head(y)


@dataclass(frozen=True)
class Network:
    name: str
    make: Callable[[], nn.Module]
    x: Tensor
    y: Tensor


def networks() -> list[Network]:
    torch.manual_seed(0)
    return [
        Network("ResNet-18-like, (16, 3, 32, 32)", resnet, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))),
        Network("ResNet-18-like, (8, 3, 64, 64)", resnet, torch.randn(8, 3, 64, 64), torch.randint(10, (8,))),
        Network("U-Net, (8, 1, 64, 64)", UNet, torch.randn(8, 1, 64, 64), torch.randint(4, (8, 64, 64))),
        Network("U-Net, (4, 1, 128, 128)", UNet, torch.randn(4, 1, 128, 128), torch.randint(4, (4, 128, 128))),
    ]


WAYS = ("Opacus, hooks", "Opacus, ghost clipping", "with convmesh.opacus", "clipped_gradient")


def steps(network: Network) -> dict[str, Callable[[], Step]]:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    from convmesh.opacus import PerSampleLoss

    x, y = network.x, network.y
    options = {"noise_multiplier": 1.0, "max_grad_norm": MAX_NORM, "expected_batch_size": len(x)}

    def by(wrap: Callable[..., nn.Module], optimizer: type[Any], **how: Any) -> Step:
        module = wrap(network.make(), **how)
        update = optimizer(torch.optim.SGD(module.parameters(), lr=0.01), **options)
        criterion: Any = PerSampleLoss(nn.CrossEntropyLoss()) if y.ndim > 1 else nn.CrossEntropyLoss()
        if optimizer is DPOptimizerFastGradientClipping:
            criterion = DPLossFastGradientClipping(module, update, criterion)

        def step() -> None:
            criterion(module(x), y).backward()
            update.step()
            update.zero_grad(set_to_none=True)  # here, so that each step begins with nothing

        return step

    def alone() -> Step:
        model = network.make()
        update = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            total = convmesh.clipped_gradient(model, F.cross_entropy, x, y, max_norm=MAX_NORM)
            for name, parameter in model.named_parameters():
                parameter.grad = (total[name] + MAX_NORM * torch.randn_like(parameter)) / len(x)
            update.step()
            update.zero_grad()

        return step

    ghost = GradSampleModuleFastGradientClipping, DPOptimizerFastGradientClipping
    makers = (
        partial(by, GradSampleModule, DPOptimizer),
        partial(by, *ghost, max_grad_norm=MAX_NORM, use_ghost_clipping=False),
        partial(by, *ghost, max_grad_norm=MAX_NORM),
        alone,
    )
    return dict(zip(WAYS, makers, strict=True))


class Way:
    """One of `WAYS`, at one network, in a process of its own."""

    def __init__(self, way: str, number: int, threads: int) -> None:
        warnings.simplefilter("ignore")  # Opacus' hooks also fire for inputs without a gradient
        torch.set_num_threads(threads)
        self.threads = threads
        batching.install()
        self.step = steps(networks()[number])[way]()

    def memory(self) -> float:
        """Megabytes."""
        return peak_memory(self.step) / 1e6

    def turn(self) -> float:
        if self.threads == 1:
            return timed(self.step, clock=time.process_time)
        return undisturbed(self.step, at_least=0, tries=3).seconds


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> None:
    """No rank takes part."""
    pool.kill()
    title = f"a step of DP-SGD: milliseconds (peak MB), torch {torch.__version__}, {options.threads} threads"
    table = Table("", *WAYS, title=title)
    for number, network in enumerate(networks()):
        if options.only not in network.name:
            continue
        with Contenders({way: (Way, way, number, options.threads) for way in WAYS}) as ways:
            memory = ways.ask_all("memory")
            turns = {way: lambda each=each: each.ask("turn") for way, each in ways.all.items()}
            seconds = interleave(turns, rounds)
        table.add_row(network.name, *(f"{seconds[way] * 1e3:.0f} ({memory[way]:.0f})" for way in WAYS))
    console.print(table)
