"""Views that only rename dimensions or numbers: in inference mode, in place, and of parts with strides of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import convmesh
from tests.cases import local_shape, place
from tests.compare import assert_close
from tests.harness import Pool

Tensor = torch.Tensor
SHAPE = (2, 4, 5, 6)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, -1, 1),
    "transpose": lambda x: x.transpose(-1, 1),
    "t": lambda x: x[0, 0].t(),
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "diagonal": lambda x: x.diagonal(dim1=0, dim2=1),  # has no rule of its own
    "pairs": lambda x: torch.view_as_real(torch.complex(x, x.sin()).conj().resolve_conj()),
    "complex": lambda x: torch.view_as_complex(torch.stack([x, x.sin()], -1)).real,
}
IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "transpose_": lambda x: x.transpose_(0, 2),
    "t_": lambda x: x[0, 0].clone().t_(),
    "squeeze_": lambda x: x[:, :, :1].clone().squeeze_(2),
    "squeeze_ all": lambda x: x[:, :1, :1].clone().squeeze_(),
}


def check_views(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with convmesh.enable():
        for view in (*VIEWS.values(), *IN_PLACE.values()):
            for mode in (torch.inference_mode, torch.no_grad):
                placed = place(x, mesh, at)
                with mode():
                    actual = view(placed.clone() if view in IN_PLACE.values() else placed)
                    doubled = actual * 2
                assert actual.to_local().shape == local_shape(actual)
                assert_close(doubled.full_tensor(), view(x.clone()) * 2)


@pytest.mark.parametrize(("mesh", "at"), [((2,), (2,)), ((2, 2), (1, 3)), ((2, 2), (3, 3)), ((2, 2), ("P", 2))])
def test_views(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run(check_views, at, mesh=mesh)


def check_own_strides(mesh: DeviceMesh) -> None:
    """What DTensor gathers has the strides of the whole by its word, but others in memory, on some ranks."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with convmesh.enable():
        gathered = place(x, mesh, (2,)).transpose(1, 2).redistribute(mesh, [Replicate()])
        part = place(x, mesh, (3,)).transpose(1, 2).redistribute(mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
        for moved in (gathered, part):
            assert_close(moved.transpose(1, 2).view(2, 20, 6).full_tensor(), x.view(2, 20, 6))
        flat = gathered.transpose(1, 2).view(2, 20, 6)
        flat[0, 3] = 7.0
        assert_close(gathered.full_tensor()[0, 3, 0], torch.full((6,), 7.0, dtype=torch.float64))
        with pytest.raises(RuntimeError):
            place(x, mesh, (0,)).transpose(1, 2).view(2, 20, 6)


def test_views_of_parts_with_strides_of_their_own(pool: Pool) -> None:
    pool.run(check_own_strides, mesh=(2,))


def penalty(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Gradients of gradients through norms: torch's formulas change shapes in place."""
    for y in (F.group_norm(x, 2, weight, bias), F.instance_norm(x, weight=weight, bias=bias)):
        (gradient,) = torch.autograd.grad((y * y.detach().sin()).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return gradient.detach(), x.grad, weight.grad


def check_penalty(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    numbers = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in (SHAPE, (4,), (4,))]
    with convmesh.enable():
        actual = penalty(*(place(t, mesh, at if t.dim() > 1 else ("R",) * len(at)).requires_grad_() for t in made))
    for mine, wanted in zip(actual, penalty(*(t.clone().requires_grad_() for t in made)), strict=True):
        assert_close(mine.full_tensor(), wanted)


@pytest.mark.parametrize(("mesh", "at"), [((2,), (2,)), ((2, 2), (0, 3))])
def test_gradient_penalties_through_norms(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run(check_penalty, at, mesh=mesh)
