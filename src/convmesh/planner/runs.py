"""Dry runs of ranks and meshes, and their summaries: nothing of a run is kept but that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..comm import is_library
from ..sharding.errors import ShardingError
from .checkpointing import Checkpoint, checkpoints
from .devices import Device
from .dry_run import dry_run
from .here import SOURCE, shared, step_seconds
from .memory import Memory, memory_of
from .needs import Need
from .problem import Mesh, PlanError, Problem, ranks_of, words
from .search import fewer, halved, largest_class, meshes, most_even, most_ranks
from .timing import Time, roofline, time_of
from .trace import Phase, Refusal, Trace
from .traffic import Gather, LayerTraffic, Neighbour, by_layer, by_mesh_dim, gathers, neighbours

Progress = Callable[[str], None]
MOST_RANKS = 4096  # that are tried where fewer do not fit


@dataclass(frozen=True)
class RankPlan:
    """A class of ranks, and what one of them needs."""

    name: str
    rank: int
    memory: Memory
    time: Time
    layers: list[LayerTraffic]
    bytes_along: dict[str, int]  # by mesh dimension
    neighbours: list[Neighbour]
    gathers: list[Gather]
    refusals: list[Refusal]
    checkpoints: list[Checkpoint]
    reads: list[Need]  # of forward passes of convolutions and poolings

    @property
    def bytes_sent(self) -> int:
        return sum(layer.bytes for layer in self.layers)


@dataclass(frozen=True)
class MeshRow:
    """A mesh that was tried. Memory is the peak of its largest rank, or where its run ended if that does not fit."""

    mesh: dict[str, int]
    fits: bool
    memory: int
    seconds: float | None
    bytes_sent: int | None
    refused: int = 0  # operators

    @property
    def ranks(self) -> int:
        return ranks_of(self.mesh)

    @property
    def enough(self) -> bool:
        return self.fits and not self.refused

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts the best first: those that fit, then by predicted time, then by memory."""
        return not self.enough, self.seconds if self.enough else -self.ranks, self.memory


class Runs:
    """Makes dry runs of one problem for one kind of device."""

    def __init__(self, problem: Problem, device: Device, progress: Progress | None) -> None:
        self.problem, self.device = problem, device
        self._say = progress or (lambda what: None)

    def _time(self, mesh: Mesh, rank: int, trace: Trace) -> Time:
        """Estimate the time of a step; on this machine from how long the rank's own work takes here."""
        if self.device.source != SOURCE:
            return time_of(trace, self.device)
        measured = step_seconds(self.problem, mesh, rank, trace, self.device.memory)
        return time_of(trace, shared(self.device, ranks_of(mesh)), measured)

    def rank(self, mesh: Mesh, name: str, rank: int) -> RankPlan:
        self._say(f"{words(mesh)}: {name}")
        trace = self._traced(mesh, rank)
        reads = [need for need in trace.needs if need.phase is Phase.FORWARD]
        blocks = checkpoints(trace, lambda operator: roofline(operator, self.device))
        return RankPlan(
            name, rank, memory_of(trace), self._time(mesh, rank, trace), by_layer(trace), by_mesh_dim(trace),
            neighbours(trace), gathers(trace), list(dict.fromkeys(trace.refusals)), blocks, reads,
        )  # fmt: skip

    def row(self, mesh: Mesh) -> MeshRow:
        """Run the largest rank of a mesh, up to where it does not fit."""
        self._say(words(mesh))
        mesh = self.problem.mesh(mesh)
        rank = largest_class(self.problem, mesh)
        trace = self._traced(mesh, rank, self.device.memory)
        if trace.exceeded is not None:
            return MeshRow(mesh, False, trace.exceeded, None, None, len(set(trace.refusals)))
        sent = sum(layer.bytes for layer in by_layer(trace))
        seconds = self._time(mesh, rank, trace).step
        return MeshRow(mesh, True, memory_of(trace).peak.total, seconds, sent, len(set(trace.refusals)))

    def search(self, ranks: int) -> list[MeshRow]:
        """Return every mesh of that many ranks and of fewer, the best first."""
        if not isinstance(ranks, int) or ranks < 1:
            raise PlanError(f"{ranks!r} ranks: take 1 or more")
        if most_even(self.problem, ranks) is None:
            shape, most = self.problem.first.shape, most_ranks(self.problem, ranks)
            raise PlanError(f"no mesh of {ranks} ranks shards an input of shape {shape}: take {most}")
        rows = [self.row(mesh) for count in fewer(ranks) for mesh in meshes(self.problem, count)]
        return sorted(rows, key=lambda row: row.order)

    def scaling(self, mesh: Mesh, tried: list[MeshRow]) -> list[MeshRow]:
        """Return a mesh for 1, 2, 4, ... ranks: the best that was tried, or else halves of this one. More ranks where
        these do not fit, and the smallest number that fits between."""
        rows = tried or [self.row(smaller) for smaller in halved(mesh)]
        best: dict[int, MeshRow] = {}
        for row in sorted(rows, key=lambda row: row.order):
            best.setdefault(row.ranks, row)

        def fits(count: int) -> bool:
            even = most_even(self.problem, count)
            if count not in best and even is not None:
                with suppress(PlanError, ShardingError):  # of a step that cannot be made for any number of ranks
                    best[count] = self.row(even)
            return count in best and best[count].enough

        most = max(best)
        while not any(row.enough for row in best.values()) and most * 2 <= MOST_RANKS:
            most *= 2
            fits(most)
        high = min((count for count, row in best.items() if row.enough), default=1)
        low = max((count for count in best if count < high), default=0)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return [best[count] for count in sorted(best)]

    def _traced(self, mesh: Mesh, rank: int, limit: int | None = None) -> Trace:
        try:
            return dry_run(self.problem, mesh, rank, limit)
        except (PlanError, ShardingError):
            raise
        except Exception as error:
            raise PlanError(_reason(error, self.problem)) from error


def _reason(error: Exception, asked: Problem) -> str:
    """Say in one line why a step cannot be planned, with the place in the user's code."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    place = _place(error)
    where = f" (at {place})" if place else ""
    if any(word in str(error) for word in ("meta tensor", "Meta tensor", "_local_scalar_dense", "nonzero()")):
        remedy = "decide by shapes or settings, and read or print no numbers"
        return f"the step depends on values, which a plan has not{where}: {remedy}"
    if "mixed torch.Tensor and DTensor" in said:
        return f"a plain tensor meets a distributed one{where}: convmesh.distribute(model, mesh) where the step is made"
    given = ", ".join(f"{name} of shape {one.shape}" for name, one in asked.inputs.items())
    return f"{said}{where}: the step was given {given}; give it inputs that it takes, as on one device"


def _place(error: Exception) -> str | None:
    trace, found = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        found = found if is_library(file) else f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found
