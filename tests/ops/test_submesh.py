"""Meshes that leave ranks out: these call every operator too, have nothing, and neither wait nor fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.families import FUNCTIONS, Example


def check_left_out(world: DeviceMesh, names: list[str]) -> list[bool]:
    """On ranks 1 and 3 of the four that all call this."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]))
    inside = []
    for name in names:
        example = Example(name)
        with convmesh.enable():
            placed = example.placed(mesh)
            try:
                actual = example.function(*placed)
                gradients = example.backward(actual, placed)
            except Exception as error:
                error.add_note(f"in {name}, {'inside' if mesh.get_coordinate() else 'left out'}")
                raise
        inside.append(mesh.get_coordinate() is not None)
        if inside[-1]:
            assert_close(actual.full_tensor(), example.expected)
            for mine, wanted in zip(gradients, example.gradients, strict=True):
                assert_close(mine.full_tensor(), wanted)
        else:
            assert all(tensor.to_local().shape == ((0,) if tensor.dim() else ()) for tensor in (actual, *gradients))
    return inside


NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, v: x.sum(), "mean": lambda x, v: x.mean() + x.sum(), "max": lambda x, v: x.max(),
    "norm": lambda x, v: x.norm(), "var": lambda x, v: x.var(), "argmax": lambda x, v: x.argmax(),
    "all": lambda x, v: (x > 0).all(), "median": lambda x, v: x.median(), "quantile": lambda x, v: x.quantile(0.5),
    "loss": lambda x, v: F.mse_loss(x, x * 2), "cross entropy": lambda x, v: F.cross_entropy(x, x.argmax(1)),
    "det": lambda x, v: torch.linalg.det(x[:3, :3]), "select": lambda x, v: v[1], "unbind": lambda x, v: v.unbind()[2],
    "view": lambda x, v: v[:1].view(()), "squeeze": lambda x, v: x[:1, :1].squeeze(), "draw": lambda x, v:
    torch.rand_like(x.sum()), "einsum": lambda x, v: torch.einsum("ij,ij->", x, x), "dot": lambda x, v: v @ v,
}  # fmt: skip


def check_numbers(world: DeviceMesh) -> None:
    """A result without dimensions is one everywhere, as DTensor has it: of several numbers a rank left out has none."""
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]))
    x, v = torch.rand(4, 3, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    with convmesh.enable():
        placed = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (x, v)]
        for name, function in NUMBERS.items():
            torch.manual_seed(0)
            actual = function(*placed)
            assert actual.to_local().shape == (), name
            torch.manual_seed(0)
            if mesh.get_coordinate() is not None:
                assert_close(actual.full_tensor(), function(x, v))
        assert placed[1].flip(0).view(5, 1).to_local().numel() == (0 if mesh.get_coordinate() is None else (3, 2)[
            mesh.get_local_rank()])  # fmt: skip


def test_numbers_on_ranks_outside_of_the_mesh(pool: Pool) -> None:
    pool.run(check_numbers, mesh=(4,))


def test_ranks_outside_of_the_mesh(pool: Pool) -> None:
    results = pool.run(check_left_out, list(FUNCTIONS), mesh=(4,))
    assert [all(result) for result in results] == [False, True, False, True]
