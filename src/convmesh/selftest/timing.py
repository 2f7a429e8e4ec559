"""Timing work on the device of this rank: what is queued there is part of it."""

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
    """Medians of rounds, before each of which `together`, such as a barrier, is called."""

    device: torch.device
    rounds: int

    def wait(self) -> None:
        """Until the device has done what was asked of it."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def seconds(self, work: Callable[[], object], repeat: int = 1, together: Together = None) -> float:
        return self.measure(work, (time.perf_counter,), repeat, together)[0]

    def measure(
        self, work: Callable[[], object], clocks: Sequence[Clock], repeat: int = 1, together: Together = None
    ) -> list[float]:
        """By how much each clock goes on in one call, the first ones apart, which compile, plan and allocate."""
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
