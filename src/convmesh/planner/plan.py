"""A plan: memory, traffic and time of a training step on a mesh, for every class of rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from . import devices
from .devices import Device
from .dry_run import silent_world
from .problem import Build, Input, Mesh, PlanError, check_mesh, problem, ranks_of, words
from .runs import MeshRow, Progress, RankPlan, Runs
from .search import classes


@dataclass(frozen=True)
class Plan:
    """What a training step needs on a mesh.

    Attributes:
        mesh: The mesh dimensions and their sizes.
        device: The device that times and the limit of memory are for.
        ranks: The classes of ranks, the one that needs most memory first.
        inputs: What the step was given.
        meshes: The meshes that were tried, the best first, if the mesh was searched for.
        scaling: A mesh for each of 1, 2, 4, ... ranks, and for the smallest number that fits.
        seconds: The predicted time of a step.

    Examples:
        >>> print(repr(convmesh.plan(nn.ReLU(), {"input": (1, 1, 8, 8)}, {"h": 2})).splitlines()[0])
        h 2 (2 ranks) of H100 SXM 80 GB: fits
    """

    mesh: dict[str, int]
    device: Device
    inputs: dict[str, Input]
    dims: dict[str, int]  # of the first input, which each mesh dimension shards
    ranks: list[RankPlan]
    meshes: list[MeshRow]
    scaling: list[MeshRow]

    @property
    def largest(self) -> RankPlan:
        return self.ranks[0]

    @property
    def busiest(self) -> RankPlan:
        """The class of ranks that sends most."""
        return max(self.ranks, key=lambda rank: rank.bytes_sent)

    @property
    def slowest(self) -> RankPlan:
        """The class of ranks whose step takes longest."""
        return max(self.ranks, key=lambda rank: rank.time.step)

    @property
    def peak(self) -> int:
        return self.largest.memory.peak.total

    @property
    def fits(self) -> bool:
        """Into the memory of the device, and nothing is refused."""
        return self.peak <= self.device.memory and not self.largest.refusals

    @property
    def seconds(self) -> float:
        return self.slowest.time.step

    @property
    def smallest(self) -> int | None:
        """The smallest number of ranks that fits."""
        return min((row.ranks for row in self.scaling if row.enough), default=None)

    @property
    def advice(self) -> list[str]:
        """What to do, in plain words."""
        from .advice import advice

        return advice(self)

    def to_json(self) -> str:
        """All tables of the plan."""
        more = {"fits": self.fits, "seconds": self.seconds, "smallest": self.smallest, "advice": self.advice}
        return json.dumps({**asdict(self), **more}, indent=2, default=str)

    def save(self, path: str | Path) -> None:
        """As a page (.html), with pictures, or as JSON (.json)."""
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise PlanError(f"{path}: give a name that ends in .html or .json")
        if path.suffix == ".html":
            from .page import page

            path.write_text(page(self), encoding="utf-8")
        else:
            path.write_text(self.to_json(), encoding="utf-8")

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
    is left behind. Bytes and messages are those of a real run. Memory is that of tensors and of workspaces of
    convolutions; an allocator needs more. Time is an estimate from the figures of the device.

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
    if mesh is None and ranks is None:
        raise PlanError("give a mesh, such as {'d': 4, 'h': 2}, or a number of ranks")
    if mesh is not None:
        check_mesh(asked, mesh)
    if mesh is not None and ranks not in (None, ranks_of(mesh)):
        raise PlanError(f"a mesh of {words(mesh)} is not {ranks}: give sizes whose product is {ranks}")
    runs = Runs(asked, on, progress)
    with silent_world():
        tried = runs.search(ranks) if mesh is None and ranks is not None else []
        chosen = dict(mesh) if mesh is not None else tried[0].mesh
        found = [runs.rank(chosen, name, rank) for name, rank in classes(asked, chosen).items()]
        found.sort(key=lambda one: -one.memory.peak.total)
        scaling = runs.scaling(chosen, tried)
    return Plan(chosen, on, dict(asked.inputs), dict(asked.dims), found, tried, scaling)


def best_mesh(
    step: nn.Module | Build,
    inputs: Mapping[str, Any],
    ranks: int,
    *,
    device: str | Device = "h100",
    optimizer: str = "adamw",
    precision: str = "fp32",
    dims: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """The mesh of at most so many ranks with the least predicted time of a step, of those that fit.

    Args:
        step: As in `plan`.
        inputs: As in `plan`.
        ranks: How many devices there are.
        device: As in `plan`.
        optimizer: As in `plan`.
        precision: As in `plan`.
        dims: As in `plan`.
        progress: As in `plan`.

    Returns:
        The sizes of the mesh dimensions by their names.

    Examples:
        >>> best = convmesh.best_mesh(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, 2)
        >>> set(best) <= {"data", "h", "w"}
        True
    """
    runs = Runs(problem(step, inputs, dims, optimizer, precision), devices.device(device), progress)
    with silent_world():
        return runs.search(ranks)[0].mesh
