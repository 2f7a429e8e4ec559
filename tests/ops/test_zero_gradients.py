"""Second derivatives of functions of which autograd knows some to be zero, without computing them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "abs": lambda x: x.abs() ** 3,
    "lp_pool": lambda x: F.lp_pool2d(x, 3, 2),
    "sign": lambda x: x.sgn() * x**2,
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2, reduction="none") * x,
}


def second(x: torch.Tensor, name: str) -> torch.Tensor:
    (first,) = torch.autograd.grad(FUNCTIONS[name](x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


def check(mesh: DeviceMesh, case: tuple[str, int]) -> None:
    name, dim = case
    x = torch.linspace(-1, 1.1, 60, dtype=torch.float64).reshape(2, 1, 5, 6)
    expected = second(x.clone().requires_grad_(), name)
    with convmesh.enable():
        assert_close(second(place(x, mesh, (dim,)).requires_grad_(), name).full_tensor(), expected)
    assert_close(second(x.clone().requires_grad_(), name), expected)


def test_second_derivatives(pool: Pool) -> None:
    pool.run_cases(check, [(name, dim) for name in FUNCTIONS for dim in (0, 2)], mesh=(2,))
