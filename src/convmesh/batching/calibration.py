"""Measuring the prices of the cost model on the machine at hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import torch
from torch import Tensor

from ..geometry import Convolution
from . import choice, cost
from ._functorch import Nature
from .algorithms import Algorithm, Task
from .contraction import FACTORS, Contraction, Role
from .folding import Mapped, Operand
from .machines import OWN
from .race import interleaved

# dims, C, O, size, kernel, stride, groups: layers as networks have them, a few of every kind that has its own prices.
LAYERS = (
    *((2, 16, 16, 32, 3, 1, 1), (2, 32, 64, 16, 3, 1, 1), (2, 64, 64, 32, 3, 1, 1), (2, 64, 128, 32, 3, 2, 1)),
    *((2, 128, 128, 16, 3, 1, 1), (2, 256, 256, 8, 3, 1, 1), (2, 512, 512, 4, 3, 1, 1), (2, 256, 256, 4, 3, 1, 1)),
    *((2, 128, 256, 16, 3, 2, 1), (1, 64, 128, 256, 5, 1, 1), (1, 256, 256, 32, 3, 1, 1)),
    *((3, 16, 32, 12, 3, 1, 1), (3, 8, 16, 20, 3, 1, 1), (3, 64, 64, 6, 3, 1, 1), (3, 32, 64, 12, 3, 2, 1)),
    *((2, 64, 256, 16, 1, 1, 1), (2, 256, 64, 16, 1, 1, 1), (2, 512, 512, 4, 1, 1, 1), (2, 128, 128, 32, 1, 1, 1)),
    *((2, 64, 128, 32, 1, 2, 1), (2, 256, 512, 8, 1, 2, 1), (2, 128, 256, 16, 1, 2, 1)),
    *((2, 3, 64, 32, 3, 1, 1), (2, 3, 64, 56, 7, 2, 1), (2, 3, 32, 32, 5, 1, 1), (2, 3, 96, 64, 4, 4, 1)),
    *((2, 1, 32, 28, 5, 1, 1), (2, 1, 16, 28, 3, 1, 1), (3, 1, 16, 16, 3, 1, 1), (1, 1, 64, 256, 7, 2, 1)),
    *((2, 32, 4, 16, 3, 1, 1), (2, 64, 3, 32, 3, 1, 1), (2, 16, 1, 32, 3, 1, 1), (1, 64, 2, 128, 5, 1, 1)),
    *((2, 32, 32, 16, 3, 1, 8), (2, 64, 64, 32, 3, 1, 16), (2, 256, 256, 8, 3, 1, 64), (2, 64, 64, 16, 3, 2, 32)),
    *((2, 64, 64, 32, 3, 1, 8), (2, 128, 128, 16, 3, 1, 4), (2, 256, 256, 8, 3, 1, 32), (1, 64, 64, 128, 5, 1, 4)),
    *((2, 96, 96, 32, 3, 1, 96), (2, 64, 64, 32, 3, 2, 64), (2, 384, 384, 8, 3, 1, 384), (2, 192, 192, 16, 3, 1, 192)),
    *((2, 3, 8, 8, 3, 1, 1), (2, 16, 16, 8, 3, 1, 1), (1, 8, 8, 32, 3, 1, 1), (2, 32, 32, 4, 1, 1, 1)),
    *((2, 8, 8, 8, 3, 1, 8), (2, 8, 8, 14, 3, 1, 4), (2, 32, 48, 20, 3, 1, 1), (2, 16, 16, 48, 5, 1, 1)),
    *((2, 4, 6, 40, 3, 1, 1), (3, 4, 6, 20, 3, 1, 1), (3, 8, 16, 14, 3, 1, 1), (2, 6, 6, 24, 5, 1, 1)),
    *((2, 96, 96, 14, 7, 1, 96), (2, 384, 384, 7, 7, 1, 384), (2, 192, 192, 16, 5, 1, 192), (1, 64, 64, 128, 7, 1, 64)),
)
# B, N and which operands are mapped: gradients per sample, ensembles with inputs of their own, and with shared ones.
MAPPINGS = (
    *((16, 1, (True, True)), (8, 8, (True, True)), (4, 16, (True, True))),
    *((8, 4, (True, False)), (8, 4, (False, True))),
)
# After so many rounds prices stay as they are.
ROUNDS = 6


def calibrate(
    *, device: str = "cpu", dtypes: Sequence[torch.dtype] = (torch.float32,), path: Path | None = None
) -> Path:
    """Measure every algorithm for vmapped convolutions on this machine, and store the times for later choices.

    It takes some minutes. `convmesh calibrate` does the same. Times of other dtypes, devices and numbers of threads
    that the file holds are kept.

    Args:
        device: The device to measure on.
        dtypes: The dtypes to measure.
        path: The file to write. By default `convmesh` in the user's cache folder.

    Returns:
        The file that was written.

    Raises:
        OSError: The file cannot be written.
    """
    path = path or cost.cache_file()
    prices = _kept(path)
    for dtype in dtypes:
        prices.update(fit(measurements(tasks(device, dtype))))
    cost.save(prices, path)
    choice.forget()
    return path


def _kept(path: Path) -> dict[str, cost.Features]:
    """What an earlier calibration has measured; a file that is none is written anew."""
    try:
        return cost.load(path)
    except cost.UNREADABLE:
        return {}


def tasks(device: str, dtype: torch.dtype) -> Iterator[Task]:
    for dims, C, O, size, kernel, stride, groups in LAYERS:  # noqa: E741
        none = (0,) * dims
        geometry = Convolution((stride,) * dims, (kernel // 2,) * dims, (1,) * dims, False, none, groups)
        sizes, kernels = (size,) * dims, (kernel,) * dims
        for batch, N, mapped in MAPPINGS:
            shapes = (N, C, *sizes), (O, C // groups, *kernels), (N, O, *geometry.output_size(sizes, kernels))
            for wanted in Role:
                contraction, name = Contraction(wanted, geometry, *shapes), str(dtype).removeprefix("torch.")
                numbers, threads = (name, dtype.itemsize), torch.get_num_threads()
                yield Task(contraction, batch, mapped, Nature.PLAIN, *numbers, device, threads, OWN)


def measurements(some_tasks: Iterable[Task]) -> Iterator[tuple[Task, Algorithm, float]]:
    """Each task by each algorithm that applies, in seconds."""
    for task in some_tasks:
        operands = [
            Mapped(_random(task, role, mapped), 0 if mapped else None)
            for role, mapped in zip(FACTORS[task.contraction.wanted], task.mapped, strict=True)
        ]
        candidates = {each: _runner(each, task, operands) for each in choice.ALGORITHMS if each.applies(task)}
        for algorithm, seconds in interleaved(candidates, task.device).items():
            yield task, algorithm, seconds


def fit(measured: Iterable[tuple[Task, Algorithm, float]]) -> dict[str, cost.Features]:
    """The prices that explain the measurements best, by their relative error."""
    by_key: dict[str, list[tuple[cost.Features, float]]] = defaultdict(list)
    for task, algorithm, seconds in measured:
        by_key[cost.key_of(algorithm, task)].append((cost.features_of(algorithm, task), seconds))
    return {key: _least_squares(samples) for key, samples in by_key.items()}


def _least_squares(samples: Sequence[tuple[cost.Features, float]]) -> cost.Features:
    """By the logarithm of estimate / time: half as much is as wrong as twice as much, and neither is preferred.

    (estimate - time) ** 2 / (estimate * time) is its square for small errors, where the estimate of the round before
    stands for that of the denominator.
    """
    amounts = torch.tensor([features for features, _ in samples]).double()
    seconds = torch.tensor([seconds for _, seconds in samples]).double()
    estimates = seconds
    for _ in range(ROUNDS):
        weights = (seconds * estimates).rsqrt()
        prices = _not_negative(amounts * weights[:, None], seconds * weights)
        estimates = (amounts @ prices).maximum(1e-2 * seconds)
    return cost.Features(*(float(f"{price:.4g}") for price in prices))


def _not_negative(rows: Tensor, values: Tensor) -> Tensor:
    """Least squares with prices that are not negative: of all subsets of features, the best whose solution is not."""
    best, best_error = torch.zeros(rows.shape[1], dtype=torch.float64), float("inf")
    for count in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), count):
            solution = torch.linalg.lstsq(rows[:, chosen], values[:, None], driver="gelsd").solution.flatten()
            error = (rows[:, chosen] @ solution - values).square().sum().item()
            if error < best_error and bool((solution >= 0).all()):
                best, best_error = torch.zeros_like(best), error
                best[list(chosen)] = solution
    return best


def _random(task: Task, role: Role, mapped: bool) -> Tensor:
    shape = task.contraction.shape(role)
    batched = (task.batch, *shape) if mapped else shape
    return torch.randn(batched, device=task.device, dtype=getattr(torch, task.dtype))


def _runner(algorithm: Algorithm, task: Task, operands: Sequence[Mapped]) -> Callable[[], object]:
    roles = FACTORS[task.contraction.wanted]

    def run() -> object:
        first, second = (Operand(role, mapped) for role, mapped in zip(roles, operands, strict=True))
        return algorithm.run(task, first, second, None)

    return run
