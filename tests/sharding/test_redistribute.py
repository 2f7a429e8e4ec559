"""Parts of a tensor go from where they are to where they are wanted, without gathering it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Replicate

import convmesh
from convmesh import _torch
from convmesh.sharding.layout import Layout
from convmesh.sharding.redistribute import move
from tests.cases import place as placed
from tests.gathers import Sizes
from tests.harness import Pool
from tests.simulated import Simulated

Case = tuple[tuple[Any, ...], tuple[Any, ...]]


def check(mesh: DeviceMesh, case: Case) -> None:
    before, after = case
    whole = torch.arange(3 * 5 * 7, dtype=torch.float64).view(3, 5, 7)
    source, wanted = placed(whole, mesh, before), placed(whole, mesh, after)
    target = Layout.of(_torch.spec_of(wanted))
    with convmesh.enable(), Sizes() as sizes:
        part = move(source, target)
    assert torch.equal(part, wanted.to_local())
    assert sizes.largest < whole.nbytes


def test_another_dimension_is_sharded(pool: Pool) -> None:
    pool.run_cases(check, [((1,), (2,)), ((2,), (0,)), ((0,), (1,))], mesh=(3,))
    pool.run_cases(check, [((0, 1), (0, 2)), ((0, 1), (2, 1)), (("R", 2), ("R", 1)), ((1, 0), (2, 0))], mesh=(2, 2))


def contribute(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    full = torch.cat([torch.randn(100, dtype=torch.float64) * 100, torch.tensor([torch.inf, 2**24 + 1])]).to(dtype)
    source = placed(full, mesh, ("R",) * mesh.ndim)
    target = Layout.of(_torch.spec_of(source)).placed((*(Replicate(),) * (mesh.ndim - 1), Partial()))
    with convmesh.enable():
        term = move(source, target)
        assert term.dtype == dtype
        assert torch.equal(_torch.wrap(term, target.spec).full_tensor(), full)


def test_a_replicated_tensor_becomes_a_sum_without_rounding() -> None:
    for mesh in ((3,), (2, 3)):
        Simulated().run_cases(contribute, [torch.float64, torch.float16, torch.int64, torch.uint8], mesh=mesh)
