"""Every way to view a tensor, written and read on either side: what is a view on one device shows what was written into
the tensor, and what is written into it reaches the tensor, or is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool, share_of

SHAPE = (4, 6, 5)
View = Callable[[torch.Tensor], torch.Tensor]

VIEWS: dict[str, View] = {
    "slice 0": lambda y: y[1:3],
    "slice 1": lambda y: y[:, 1:4],
    "steps": lambda y: y[::2, 1::3],
    "select": lambda y: y[1],
    "select twice": lambda y: y[:, 2][1:3],
    "permute": lambda y: y.permute(2, 0, 1)[1:],
    "flatten": lambda y: y.flatten()[7:50],
    "flatten 1": lambda y: y.flatten(1),
    "flatten 0": lambda y: y.flatten(0, 1),
    "view": lambda y: y.view(8, 3, 5),
    "unflatten": lambda y: y.unflatten(1, (3, 2)),
    "part of a part": lambda y: y[1:3].view(2, 2, 3, 5)[:, 1],
    "expand": lambda y: y[:1].expand(4, 6, 5),
    "expand 1": lambda y: y[:, 1:2].expand(4, 6, 5),
    "expand in front": lambda y: y[1].expand(3, 6, 5),
    "broadcast": lambda y: torch.broadcast_tensors(y[:1], y)[0],
    "unfold 0": lambda y: y.unfold(0, 2, 1),
    "unfold 1": lambda y: y.unfold(1, 2, 2),
    "diagonal": lambda y: y.diagonal(0, 0, 1),
    "split": lambda y: y.split([1, 4, 1], 1)[1],
    "unbind": lambda y: y.unbind(0)[2],
    "unbind 1": lambda y: y.unbind(1)[4],
    "squeeze": lambda y: y[:, 1:2].squeeze(1),
    "detach": lambda y: y.detach()[:, 1:],
}
LAZY: dict[str, View] = {
    "conjugate": lambda y: y.conj(),
    "negative": lambda y: torch._neg_view(y),
    "imaginary part of the conjugate": lambda y: y.conj().imag,
    "real part": lambda y: y.real,
    "adjoint": lambda y: y.adjoint(),
}


def write_the_tensor(y: torch.Tensor, view: View) -> list[torch.Tensor]:
    z = view(y)
    y.mul_(2)
    first = z.clone()
    y[1:].add_(1)
    second = z * 1
    y[:, 2:4].mul_(3)
    return [first, second, z + 0, y]


def write_the_view(y: torch.Tensor, view: View) -> list[torch.Tensor]:
    z = view(y)
    z.mul_(2)
    first = y * 1
    z[1:].add_(1)
    second = y * 1
    y.mul_(2)
    third = z * 1
    z.zero_()
    return [first, second, third, y]


def write_both(y: torch.Tensor, view: View) -> list[torch.Tensor]:
    z = view(y)
    w = z[1:]
    y.add_(3)
    w.mul_(2)
    z.sub_(1)
    y.mul_(2)
    return [y, z * 1, w * 1]


def check(mesh: DeviceMesh, case: tuple[Any, str, str | None, tuple[Any, ...]]) -> str:
    """Of what torch does for one process; it refuses writes into expanded tensors itself."""
    write, name, lazy, at = case
    view = VIEWS[name]
    x = torch.linspace(-2, 3, 120, dtype=torch.float64).view(SHAPE)
    x = x if lazy is None else torch.complex(x, x.flip(0, 1))

    def seen(y: torch.Tensor) -> torch.Tensor:
        return view(y if lazy is None else LAZY[lazy](y))

    try:
        expected = write(x * 1, seen)
    except RuntimeError:
        return "refused: True"
    with convmesh.enable(), torch.no_grad():
        y = place(x, mesh, at) * 1
        try:
            actual = write(y, seen)
        except (RuntimeError, convmesh.ShardingError) as error:
            return f"refused: {write is not write_the_tensor and 'would write into a copy' in str(error)}"
    for mine, wanted in zip(actual, expected, strict=True):
        assert isinstance(mine, DTensor)
        assert_close(mine.full_tensor(), wanted.resolve_conj().resolve_neg())
    return "equal"


def check_all(pool: Pool, cases: Sequence[Any], mesh: tuple[int, ...]) -> None:
    cases = share_of(cases, 1 / 3)
    for case, ranks in zip(cases, pool.run_cases(check, cases, mesh=mesh), strict=True):
        assert set(ranks) in ({"equal"}, {"refused: True"}), (case, ranks)


WRITES = [write_the_tensor, write_the_view, write_both]
PLACES: list[tuple[tuple[int, ...], list[tuple[Any, ...]]]] = [
    ((2,), [(0,), (1,), (2,)]),
    ((2, 2), [(0, 1), (1, 1), ("R", 1)]),
]


@pytest.mark.parametrize(("mesh", "places"), PLACES)
def test_views(pool: Pool, mesh: tuple[int, ...], places: list[Any]) -> None:
    check_all(pool, [(w, name, None, at) for w in WRITES for name in VIEWS for at in places], mesh)


@pytest.mark.parametrize(("mesh", "places"), PLACES)
def test_views_of_what_is_to_be_negated_or_conjugated(pool: Pool, mesh: tuple[int, ...], places: list[Any]) -> None:
    ways = [(w, name, lazy) for w in WRITES for name in VIEWS for lazy in LAZY]
    check_all(pool, [(*way, at) for n, way in enumerate(ways) for at in places[n % 2 :: 2]], mesh)


def read_lazy(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """What operators and collectives see of such tensors."""
    x = torch.linspace(-2, 3, 120, dtype=torch.float64).view(SHAPE)
    w = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5)
    with convmesh.enable():
        y, z = torch._neg_view(place(x, mesh, at)), place(x, mesh, at)
        weight = convmesh.replicate(w, mesh)
        for mine, wanted in (
            (torch.nn.functional.linear(y, weight), torch.nn.functional.linear(-x, w)),
            (torch.nn.functional.linear(z, torch._neg_view(weight)), torch.nn.functional.linear(x, -w)),
            (y.full_tensor(), -x),
            (y.diagonal(0, 0, 1) + 0, -x.diagonal(0, 0, 1)),
        ):
            assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, wanted)


def test_reads_of_what_is_to_be_negated(pool: Pool) -> None:
    pool.run_cases(read_lazy, [(0,), (1,), (2,)], mesh=(2,))


def lists_of_parts(mesh: DeviceMesh | None, at: tuple[Any, ...]) -> list[torch.Tensor]:
    """Lists whose tensors are parts of one, and have elements in common: one is written after the other."""
    x = torch.linspace(-2, 3, 120, dtype=torch.float64).view(SHAPE)
    y = (x if mesh is None else place(x, mesh, at)) * 1
    z = y[1:]
    torch._foreach_mul_([y[:, 1:], y[:1]], 2.0)
    torch._foreach_addcmul_(
        [y[:, 1:], z[:1], y], [y[:, 1:] * 1, y[:1] * 1, y * 1], [y[:, 1:] * 1, y[:1], y * 2], [2, 3, 4]
    )
    torch._foreach_add_([y[:, 1:], y[:1]], [y[:, 1:] * 1, y[:1] * 1], alpha=2)
    return [y, z * 1]


def write_lists(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    with convmesh.enable(), torch.no_grad():
        for mine, wanted in zip(lists_of_parts(mesh, at), lists_of_parts(None, at), strict=True):
            assert_close(mine.full_tensor(), wanted)


def test_lists_of_parts_that_overlap(pool: Pool) -> None:
    pool.run_cases(write_lists, [(0,), (1,), (2,)], mesh=(2,))
