"""A plan: memory, traffic and time of a training step on a mesh, for every class of rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from ..comm import is_library
from ..sharding.errors import ShardingError
from . import devices
from .devices import Device
from .dry_run import dry_run, silent_world
from .here import measured
from .memory import Memory, memory_of
from .problem import Build, Mesh, PlanError, Problem, check_mesh, problem, ranks_of
from .search import classes, fewer, largest_class, meshes
from .timing import Seconds, Time, time_of
from .trace import Trace
from .traffic import Gather, LayerTraffic, by_layer, by_mesh_dim, gathers

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RankPlan:
    """Of a class of ranks: which it is, and what one of its ranks needs."""

    name: str
    rank: int
    memory: Memory
    time: Time
    layers: list[LayerTraffic]
    bytes_along: dict[str, int]  # by mesh dimension
    gathers: list[Gather]


@dataclass(frozen=True)
class MeshRow:
    """A mesh that was tried. Memory is the peak of its largest rank, or where its run ended if that does not fit."""

    mesh: dict[str, int]
    fits: bool
    memory: int
    seconds: float | None
    bytes_sent: int | None


@dataclass(frozen=True)
class Plan:
    """What a training step needs on a mesh.

    Attributes:
        mesh: The mesh dimensions and their sizes.
        device: The device that times and the limit of memory are for.
        ranks: The classes of ranks, the one that needs most memory first.
        meshes: Other meshes that were tried, the best first, if the mesh was searched for.
        seconds: The predicted time of a step.

    Examples:
        >>> print(repr(convmesh.plan(nn.ReLU(), {"input": (1, 1, 8, 8)}, {"h": 2})).splitlines()[0])
        h 2 (2 ranks) of H100 SXM 80 GB: fits
    """

    mesh: dict[str, int]
    device: Device
    ranks: list[RankPlan]
    meshes: list[MeshRow] = field(default_factory=list)

    @property
    def largest(self) -> RankPlan:
        return self.ranks[0]

    @property
    def peak(self) -> int:
        return self.largest.memory.peak.total

    @property
    def fits(self) -> bool:
        return self.peak <= self.device.memory

    @property
    def seconds(self) -> float:
        return max(rank.time.step for rank in self.ranks)

    def to_json(self) -> str:
        """All tables of the plan."""
        return json.dumps({**asdict(self), "fits": self.fits, "seconds": self.seconds}, indent=2)

    def __repr__(self) -> str:
        from .text import essence

        return essence(self)

    def __str__(self) -> str:
        from .text import report

        return report(self)


def plan(
    step: nn.Module | Build,
    inputs: Mapping[str, Any],
    mesh: Mesh | None = None,
    *,
    ranks: int | None = None,
    device: str | Device = "h100",
    optimizer: str = "adamw",
    precision: str = "fp32",
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find out what a training step needs on a mesh, without the hardware.

    Ranks run one by one in this process, without values and without communication: no process group is needed, and none
    is left behind. Bytes and messages are those of a real run. Memory is that of tensors; an allocator needs more. Time
    is an estimate from the figures of the device.

    Args:
        step: A model: then a step is its forward pass, the mean of its outputs as loss, backward and the optimizer. Or
            a function that is called with a mesh, and returns the step: a function of the inputs. It distributes the
            model and makes the optimizer; the step may hold the loss, autocast, checkpointing, several backward passes.
        inputs: By the name of the argument, the global shape, or an `Input` with a dtype.
        mesh: The sizes of mesh dimensions by their names: "data" for the batch, "d", "h", "w" for space.
        ranks: Without a mesh: take the best one of at most so many ranks, as `best_mesh` does.
        device: a100, h100, h200, b200, mi300x, l40s, here, a JSON file, or a `Device`.
        optimizer: For a model: sgd, adam or adamw.
        precision: For a model: fp32, or autocast to bf16 or fp16.
        dims: For other names of mesh dimensions, the dimension of the first input that each shards.
        progress: Called with what is being done.

    Returns:
        The plan. Print it, or look at its tables.

    Raises:
        PlanError: The input cannot be planned; the message says why, and what would help.
        ShardingError: An operator is refused on this mesh.

    Examples:
        >>> plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, {"h": 4})
        >>> plan.fits, plan.largest.bytes_along["h"] > 0
        (True, True)
    """
    asked, on = problem(step, inputs, dims, optimizer, precision), devices.device(device)
    if (mesh is None) == (ranks is None):
        raise PlanError("give either a mesh, such as {'d': 4, 'h': 2}, or a number of ranks")
    with silent_world():
        tried = _search(asked, ranks, on, progress) if ranks is not None else []
        chosen = dict(mesh) if mesh is not None else tried[0].mesh
        check_mesh(asked, chosen)
        return _plan(asked, chosen, on, tried, progress)


def best_mesh(
    step: nn.Module | Build, inputs: Mapping[str, Any], ranks: int, *, device: str | Device = "h100", **options: Any
) -> dict[str, int]:
    """The mesh of at most so many ranks with the least predicted time of a step, of those that fit.

    Args:
        step: As in `plan`.
        inputs: As in `plan`.
        ranks: How many devices there are.
        device: As in `plan`.
        **options: `optimizer`, `precision`, `dims` and `progress` of `plan`.

    Returns:
        The sizes of the mesh dimensions by their names.

    Examples:
        >>> best = convmesh.best_mesh(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, 2)
        >>> set(best) <= {"data", "h", "w"}
        True
    """
    return plan(step, inputs, ranks=ranks, device=device, **options).mesh


def _seconds(on: Device) -> Seconds | None:
    return measured(on) if on.source == "measured now" else None


def _plan(asked: Problem, mesh: dict[str, int], on: Device, tried: list[MeshRow], progress: Progress | None) -> Plan:
    found, seconds = [], _seconds(on)
    for name, rank in classes(asked, mesh).items():
        _say(progress, f"{words(mesh)}: {name}")
        trace = _traced(asked, mesh, rank)
        found.append(_rank(name, rank, trace, mesh, on, seconds))
    found.sort(key=lambda one: -one.memory.peak.total)
    return Plan(mesh, on, found, tried)


def _rank(name: str, rank: int, trace: Trace, mesh: Mesh, on: Device, seconds: Seconds | None) -> RankPlan:
    time = time_of(trace, mesh, on, seconds)
    return RankPlan(name, rank, memory_of(trace), time, by_layer(trace), by_mesh_dim(trace, mesh), gathers(trace))


def _search(asked: Problem, ranks: int, on: Device, progress: Progress | None) -> list[MeshRow]:
    """Every mesh of that many ranks, and of fewer; those that fit first, then by predicted time, then by memory."""
    if ranks < 1:
        raise PlanError(f"{ranks} ranks: take 1 or more")
    rows, seconds = [], _seconds(on)
    for count in fewer(ranks):
        for mesh in meshes(asked, count):
            _say(progress, words(mesh))
            rows.append(_row(asked, mesh, on, seconds))
    if not rows:
        raise PlanError(f"no mesh of {ranks} ranks shards an input of shape {asked.first.shape}: take fewer ranks")
    return sorted(rows, key=lambda row: (not row.fits, row.seconds or row.memory, row.memory))


def _row(asked: Problem, mesh: dict[str, int], on: Device, seconds: Seconds | None) -> MeshRow:
    trace = _traced(asked, mesh, largest_class(asked, mesh), on.memory)
    if trace.exceeded is not None:
        return MeshRow(mesh, False, trace.exceeded, None, None)
    sent = sum(layer.halo_bytes + layer.reduction_bytes + layer.gather_bytes for layer in by_layer(trace))
    return MeshRow(mesh, True, memory_of(trace).peak.total, time_of(trace, mesh, on, seconds).step, sent)


def _traced(asked: Problem, mesh: Mesh, rank: int, limit: int | None = None) -> Trace:
    try:
        return dry_run(asked, mesh, rank, limit)
    except (PlanError, ShardingError):
        raise
    except Exception as error:
        raise PlanError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """In one line, with the place in the user's code."""
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    where = _place(error)
    if "meta tensor" in str(error) or "_local_scalar_dense" in str(error):
        said = "the step depends on values, which a plan has not: decide by shapes or settings instead"
    return f"{said}{f' (at {where})' if where else ''}"


def _place(error: Exception) -> str | None:
    trace, found = error.__traceback__, None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        found = found if is_library(file) else f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _say(progress: Progress | None, what: str) -> None:
    if progress is not None:
        progress(what)


def words(mesh: Mesh) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) + f" ({ranks_of(mesh)} ranks)"


def columns(rows: Sequence[MeshRow]) -> list[tuple[str, ...]]:
    """For tables of meshes."""
    from .text import bytes_words, seconds_words

    return [
        (words(row.mesh), "yes" if row.fits else "no", bytes_words(row.memory) + ("" if row.fits else " and more"),
         "" if row.seconds is None else seconds_words(row.seconds),
         "" if row.bytes_sent is None else bytes_words(row.bytes_sent))
        for row in rows
    ]  # fmt: skip
