"""Writing into parts of sharded dimensions reaches the whole, whatever writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

SHAPE = (2, 3, 5, 7)


def assign(x: torch.Tensor, values: torch.Tensor) -> None:
    x[:, :, 1:3, 2:6:2] = 0
    x[..., 4] = values
    x[:, 1, 3:, 1:] += 2
    x.narrow(3, 5, 2).mul_(3)
    x[0] = 7


def elementwise(x: torch.Tensor, values: torch.Tensor) -> None:
    x[..., 1:6].clamp_(10, 100)
    x[:, :, :3].pow_(2).sub_(1)
    x[1:].masked_fill_(x[1:] > 50, -1.0)
    x[..., ::2].copy_(x[..., ::2].neg())
    x[..., 3].addcmul_(values, values, value=3).sigmoid_()


def views_of_parts(x: torch.Tensor, values: torch.Tensor) -> None:
    x[..., 1:3].transpose(0, 1).zero_()
    x[:, :, 2:].permute(3, 2, 1, 0)[4].add_(1)
    x[..., 2:5][:, :, 1:4][..., 1].mul_(10)
    x[:, :, 1:3].detach().sqrt_()
    x[..., 4:].data.exp_().reciprocal_()


def without_rules(x: torch.Tensor, values: torch.Tensor) -> None:
    x[:, :, 1:].nextafter_(x[:, :, 1:] + 1)
    x[1:].ldexp_(x[1:] * 0 + 2)


def parts_at_once(x: torch.Tensor, values: torch.Tensor) -> None:
    first, _, last = x.split(3, 3)
    first.fill_(1)
    last.add_(first[..., :1])
    for number, part in enumerate(x.unbind(2)):
        part.mul_(number)
    torch._foreach_add_([x[..., 1:2], x[..., 5:]], 4.0)


def old_parts(x: torch.Tensor, values: torch.Tensor) -> None:
    """A part that was taken before the whole changed, and parts that overlap."""
    part, other = x[..., 1:5], x[:, :, 2:]
    x.add_(1)
    part.mul_(2)
    other.sub_(3)
    part.abs_()


def out_of_parts(x: torch.Tensor, values: torch.Tensor) -> None:
    part = x[..., 2]
    torch.add(values, values, out=part)


def reshaped(x: torch.Tensor, values: torch.Tensor) -> None:
    x.view(6, 35).mul_(2)
    x.view(30, 7)[3].zero_()


STEPS = [assign, elementwise, views_of_parts, without_rules, parts_at_once, old_parts, out_of_parts, reshaped]
PLACES: list[tuple[tuple[int, ...], list[tuple[Any, ...]]]] = [
    ((2,), [(3,), (2,), (0,)]),
    ((4,), [(3,), (2,)]),
    ((2, 2), [(2, 3), (3, 3), ("R", 2)]),
    ((1, 2), [(1, "R"), (2, 3), (3, 3)]),
]


def write(mesh: DeviceMesh, case: tuple[Callable[..., None], tuple[Any, ...]]) -> None:
    steps, at = case
    x, values = torch.arange(210, dtype=torch.float64).view(SHAPE), torch.ones(2, 3, 5, dtype=torch.float64)
    expected = x.clone()
    steps(expected, values)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with convmesh.enable(), mode():
            actual = place(x, mesh, at)
            steps(actual, place(values, mesh, ("R",) * len(at)))
            assert_close(actual.full_tensor(), expected)


@pytest.mark.parametrize(("mesh", "places"), PLACES)
def test_writing_into_parts_reaches_the_whole(pool: Pool, mesh: tuple[int, ...], places: list[Any]) -> None:
    pool.run_cases(write, [(steps, at) for steps in STEPS for at in places], mesh=mesh)


def write_twice(mesh: DeviceMesh, case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    """Into reshaped tensors of which some ranks, or all of them, have what they need already."""
    shape, at = case
    x = torch.arange(60, dtype=torch.float64).view(shape)
    with convmesh.enable():
        for change in (
            lambda y: y.flatten(1),
            lambda y: y.flatten(),
            lambda y: y.view(-1, 2),
            lambda y: y[1:].view(-1),
        ):
            ours, dense = place(x, mesh, at) * 1.0, x * 1.0
            for y in (ours, dense):
                part = change(y)
                part.mul_(0.5)
                part.flatten().add_(1)
                part.mul_(3.0)
            assert_close(ours.full_tensor(), dense)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_dimensions_of_one_rank_and_of_one_index(pool: Pool, mesh: tuple[int, ...]) -> None:
    shapes = [(4, 1, 15), (1, 4, 15), (12, 5, 1)]
    cases = [(shape, at) for shape in shapes for at in ((1, "R"), (0, "R"), ("R", 1), (1, 2), (0, 0), (2, 0))]
    pool.run_cases(write_twice, cases, mesh=mesh)


def scale_part(h: torch.Tensor) -> torch.Tensor:
    h[..., 1:3].mul_(2)
    h[:, :, 2:] = 1
    return h


def change_index(h: torch.Tensor) -> torch.Tensor:
    h[..., 1].mul_(3)
    h[..., 0] += h[..., 1]
    return h


def change_reshaped(h: torch.Tensor) -> torch.Tensor:
    h.flatten(1).mul_(2)
    return h.view(6, 35).add_(1)


def differentiate(mesh: DeviceMesh, case: tuple[Callable[..., torch.Tensor], tuple[Any, ...]]) -> None:
    steps, at = case
    dense = torch.linspace(-1, 2, 210, dtype=torch.float64).view(SHAPE).requires_grad_()
    steps(dense * 3).square().sum().backward()
    with convmesh.enable():
        x = place(dense.detach(), mesh, at).requires_grad_()
        steps(x * 3).square().sum().backward()
    assert_close(x.grad.full_tensor(), dense.grad)


def test_what_is_written_into_parts_has_gradients(pool: Pool) -> None:
    for mesh, places in PLACES[1:]:
        cases = [(steps, at) for steps in (scale_part, change_index, change_reshaped) for at in places]
        pool.run_cases(differentiate, cases, mesh=mesh)


def release(mesh: DeviceMesh) -> None:
    """A part keeps the whole, as a view does, and nothing keeps the part."""
    with convmesh.enable():
        x = place(torch.arange(12, dtype=torch.float64), mesh, (0,))
        part = x[3:9]
        memory = StorageWeakRef(part.to_local().untyped_storage())
        part.mul_(2)
        del part
        assert memory.expired()


def test_nothing_keeps_a_part(pool: Pool) -> None:
    pool.run(release, mesh=(2,))
