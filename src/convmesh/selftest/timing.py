"""Timing work on this rank's device, including what it has queued there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Clock = Callable[[], float]
Together = Callable[[], object] | None


@dataclass(frozen=True)
class Stopwatch:
    """Measures medians over rounds; `together`, such as a barrier, is called before each round."""

    device: torch.device
    rounds: int

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeat: int = 1, together: Together = None) -> float:
        """Return the seconds of one call of `work`."""
        return self.measure(work, (time.perf_counter,), repeat, together)[0]

    def measure(
        self, work: Callable[[], object], clocks: Sequence[Clock], repeat: int = 1, together: Together = None
    ) -> list[float]:
        """Return how far each clock advances in one call of `work`, after two calls that compile, plan and allocate."""
        for _ in range(2):
            work()
        rounds = []
        for _ in range(self.rounds):
            self.wait()
            if together is not None:
                together()
            began = [clock() for clock in clocks]
            for _ in range(repeat):
                work()
            self.wait()
            rounds.append([(clock() - start) / repeat for clock, start in zip(clocks, began, strict=True)])
        return [statistics.median(column) for column in zip(*rounds, strict=True)]
