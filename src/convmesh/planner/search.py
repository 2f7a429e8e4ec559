"""Which ranks of a mesh to look at, and which meshes of so many ranks to try."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from math import prod

from ..geometry import shards
from .problem import DATA, Mesh, Problem

_WHERE = ("interior", "face", "edge", "corner")


def classes(problem: Problem, mesh: Mesh) -> dict[str, int]:
    """Return a rank of every class by where it is. Ranks of a class own as much, and have as many neighbours."""
    places = [_places(problem.extent(name), size, name == DATA) for name, size in mesh.items()]
    sizes = list(mesh.values())
    found: dict[str, int] = {}
    for place in product(*places):
        rank = sum(at * prod(sizes[number + 1 :]) for number, at in enumerate(place))
        found[_words(mesh, place)] = rank
    return found


def largest_class(problem: Problem, mesh: Mesh) -> int:
    """Return a rank that owns most, and has neighbours on as many sides as one that does can have."""
    sizes, rank = list(mesh.values()), 0
    for number, (name, size) in enumerate(mesh.items()):
        owned = [len(own) for own in shards(problem.extent(name) or size, (size,))]
        full = [at for at in range(size) if owned[at] == max(owned)]
        at = next((one for one in full if 0 < one < size - 1), full[0])
        rank += at * prod(sizes[number + 1 :])
    return rank


def _places(extent: int | None, size: int, alone: bool) -> list[int]:
    """Return places along a mesh dimension that differ: the first, the last, and between them one for each number of
    indices owned. Samples have no neighbours: of them only the number counts."""
    if extent is None:
        return [0]
    owned = [len(own) for own in shards(extent, (size,))]
    ends = set() if alone else {0, size - 1}
    others: dict[int, int] = {}
    for at in range(size):
        if at not in ends:
            others.setdefault(owned[at], at)
    return sorted(ends | set(others.values()))


def _words(mesh: Mesh, place: tuple[int, ...]) -> str:
    borders = sum(
        size > 1 and at in (0, size - 1)
        for (name, size), at in zip(mesh.items(), place, strict=True) if name != DATA
    )  # fmt: skip
    dims = sum(size > 1 for name, size in mesh.items() if name != DATA)
    kind = "" if not dims else _WHERE[min(borders + 3 - dims, 3)] if borders else "interior"
    return f"{kind} ({', '.join(f'{name} {at}' for name, at in zip(mesh, place, strict=True))})".lstrip()


def meshes(problem: Problem, ranks: int) -> Iterator[dict[str, int]]:
    """Yield every mesh of so many ranks over the batch and the spatial dimensions. None but the batch gets more ranks
    than half of its indices: such halos are as large as the shards."""
    names = [name for name in problem.dims if problem.own or problem.first.shape[problem.dims[name]] > 1]
    most = [_most(problem, name) for name in names]

    def share(number: int, left: int) -> Iterator[tuple[int, ...]]:
        if number == len(names):
            if left == 1:
                yield ()
            return
        for size in (size for size in range(1, min(left, most[number]) + 1) if left % size == 0):
            for others in share(number + 1, left // size):
                yield (size, *others)

    for sizes in share(0, ranks):
        yield dict(zip(names, sizes, strict=True))


def most_even(problem: Problem, ranks: int) -> dict[str, int] | None:
    """Return the mesh of so many ranks whose largest rank owns least; of several, the one with the smallest faces."""

    def owned(mesh: Mesh) -> tuple[int, int]:
        sides = {name: -(-(problem.extent(name) or 1) // size) for name, size in mesh.items()}
        volume = prod(sides.values())
        cut = [name for name, size in mesh.items() if size > 1 and name != DATA]
        return volume, sum(volume // sides[name] for name in cut)

    return min(meshes(problem, ranks), key=owned, default=None)


def most_ranks(problem: Problem, ranks: int) -> int:
    """Return the largest number of ranks up to this of which there is a mesh."""
    limit = min(ranks, prod(_most(problem, name) for name in problem.dims))
    return next(count for count in range(limit, 0, -1) if most_even(problem, count) is not None)


def _most(problem: Problem, name: str) -> int:
    extent = problem.extent(name)
    return sys.maxsize if extent is None else max(1, extent if name == DATA else extent // 2)


def fewer(ranks: int) -> list[int]:
    """Return 1, 2, 4, ... and the number itself."""
    return sorted({*(2**power for power in range(ranks.bit_length()) if 2**power <= ranks), ranks})


def halved(mesh: Mesh) -> list[dict[str, int]]:
    """Return the mesh, and smaller ones down to one rank, each with half of the largest mesh dimension."""
    found = [dict(mesh)]
    while max(found[-1].values()) > 1:
        longest = max(found[-1], key=lambda name: found[-1][name])
        found.append(found[-1] | {longest: -(-found[-1][longest] // 2)})
    return found
