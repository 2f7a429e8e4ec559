"""A function of every operator family on the stand-in accelerator: equal to one process, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.accelerator.ranks import results
from tests.cases import place, places_of
from tests.compare import assert_close
from tests.ops.families import ALL_FUNCTIONS, Example


def agree(mesh: DeviceMesh, name: str) -> None:
    """With one process on the same device: its random numbers are not the CPU's."""
    example = Example(name)
    tensors = [tensor.to(mesh.device_type) for tensor in example.tensors]
    dense = [tensor.clone().requires_grad_() for tensor in tensors]
    expected = example.function(*dense)
    seed = example.seed.to(mesh.device_type)
    wanted = torch.autograd.grad(expected, dense, seed if expected.dim() else None)
    # The height along the first mesh dimension, and the width along a second.
    at: list[tuple[Any, ...]] = [(2, 3)[: mesh.ndim], *[("R",) * mesh.ndim] * (len(tensors) - 1)]
    with convmesh.enable():
        placed = [place(tensor, mesh, where).requires_grad_() for tensor, where in zip(tensors, at, strict=True)]
        actual = example.function(*placed)
        assert isinstance(actual, DTensor)
        seed = place(seed, mesh, places_of(actual))
        gradients = torch.autograd.grad(actual, placed, seed if actual.dim() else None)
        for mine, one in zip((actual, *gradients), (expected, *wanted), strict=True):
            assert_close(mine.detach().full_tensor().cpu(), one.detach().cpu())  # type: ignore[attr-defined]


def failures(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    for name in ALL_FUNCTIONS:
        try:
            agree(mesh, name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_all_families_agree_with_one_process(mesh: tuple[int, ...]) -> None:
    for found in results(failures, mesh=mesh):
        assert not found
