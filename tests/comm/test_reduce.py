"""Sums and extremes over ranks, of few numbers, which go at once, and of many, which the backend reduces."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from convmesh.comm import all_gather_stacked, all_reduce
from convmesh.comm.reduce import FEW_BYTES
from tests.compare import assert_close
from tests.harness import Pool
from tests.launch import launch

ops = torch.ops.c10d_functional
MESHES = [(2,), (3,), (2, 2), (1, 4)]
FEW, MANY = (2, 5), (FEW_BYTES, 2)


def terms(mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """[rank, ...]: what each rank of the mesh has, with a NaN among the numbers of one of them."""
    made = torch.randn(mesh.size(), *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if dtype.is_complex:
        return torch.complex(made, made.flip(1))
    if not dtype.is_floating_point:
        return (made * 100).to(dtype)  # exact in any order
    made[-1, 1, 0] = torch.nan
    return made.to(dtype)


def reduce(mesh: DeviceMesh, case: tuple[str, tuple[int, ...], torch.dtype]) -> None:
    op, shape, dtype = case
    every = terms(mesh, shape, dtype)
    expected = every.sum(0, dtype=dtype) if op == "sum" else {"max": every.amax, "min": every.amin}[op](0)
    dims = tuple(range(mesh.ndim))
    own = every[mesh.get_rank()] if mesh.ndim == 1 else every[mesh.mesh.flatten().tolist().index(mesh.get_rank())]
    before = own.clone()
    with convmesh.enable():
        assert_close(all_reduce(own, mesh, dims, op), expected)
    assert torch.equal(own.nan_to_num(), before.nan_to_num()), "what was given is left as it was"


def stack(mesh: DeviceMesh, case: tuple[tuple[int, ...], torch.dtype]) -> None:
    every = terms(mesh, *case)
    own = every[mesh.mesh.flatten().tolist().index(mesh.get_rank())]
    with convmesh.enable():  # then all dtypes travel
        assert torch.equal(all_gather_stacked(own, mesh, tuple(range(mesh.ndim))), every)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_all_ranks_have_the_sum_and_the_extremes_of_all(pool: Pool, mesh: tuple[int, ...]) -> None:
    types = (torch.float64, torch.float32, torch.int64, torch.int16)
    cases = [(op, s, t) for op in ("sum", "max", "min") for s in (FEW, MANY) for t in types]
    pool.run_cases(reduce, cases + [("sum", s, torch.complex128) for s in (FEW, MANY)], mesh=mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_what_each_has_stands_in_the_order_of_ranks(pool: Pool, mesh: tuple[int, ...]) -> None:
    shapes, types = [FEW, MANY, (0, 3), (1,)], (torch.int64, torch.int16, torch.bool, torch.complex64)
    pool.run_cases(stack, [(shape, dtype) for shape in shapes for dtype in types], mesh=mesh)


def one_message_to_each(mesh: DeviceMesh) -> tuple[str, int]:
    """The kinds of collectives that a sum of few numbers and one of more take."""
    with convmesh.enable(), CommDebugMode() as counted:
        for count in (2, FEW_BYTES // 8):
            all_reduce(torch.ones(count), mesh, (0,))
    return str(torch.distributed.get_backend()), counted.get_comm_counts()[ops.all_to_all_single]


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo"])
def test_by_whatever_name_gloo_was_asked_for(backend: str | None) -> None:
    for outcome in launch(one_message_to_each, mesh=(2,), names=("h",), backend=backend):
        assert outcome.exit_code == 0, outcome.message
        name, messages = outcome.result
        assert name == (backend or "undefined")
        assert messages == 2, outcome.result
