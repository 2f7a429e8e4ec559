"""The figures of a report, computed from what the runs have reported."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .settings import Settings, Shape
from .traffic import Layer
from .training import Run

Runs = dict[Shape | None, list[Run]]


@dataclass(frozen=True)
class Report:
    """The results of all runs. `runs` has the single process, if there was one, before the meshes."""

    settings: Settings
    runs: Runs
    command: str
    seconds: float

    @property
    def meshes(self) -> list[Shape]:
        return [shape for shape in self.runs if shape is not None]

    @property
    def largest(self) -> Shape:
        return max(self.meshes, key=lambda shape: shape[0] * shape[1])

    @property
    def one(self) -> Run | None:
        return self.runs[None][0] if None in self.runs else None

    def differences(self, shape: Shape) -> list[float]:
        """The relative difference of each step's loss from that of one process."""
        assert self.one is not None
        pairs = zip(self.runs[shape][0].losses, self.one.losses, strict=True)
        return [abs(loss - expected) / abs(expected) for loss, expected in pairs]

    def traffic(self, shape: Shape) -> list[tuple[Layer, int, int]]:
        """Return (layer, bytes of halos that all ranks sent for it in a step, the least possible) for each layer."""
        element = 8 if self.settings.double else 4
        rows = []
        for ranks in zip(*(run.layers for run in self.runs[shape]), strict=True):
            sides = ranks[0].sides
            rows.append((ranks[0], sum(layer.halo for layer in ranks), sides.least_bytes(element) if sides else 0))
        return rows

    def totals(self, shape: Shape) -> tuple[int, int]:
        """Return the bytes of halos sent in a step, and the least possible, over all layers."""
        rows = self.traffic(shape)
        return sum(sent for _, sent, _ in rows), sum(least for _, _, least in rows)

    def memory(self, shape: Shape | None) -> int:
        return max(run.memory for run in self.runs[shape])

    def step_seconds(self, shape: Shape | None) -> float:
        """The median time of a step on the slowest rank."""
        return max(median(run.seconds) for run in self.runs[shape])
