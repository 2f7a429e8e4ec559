"""Parts of a tensor go from where they are to where they are wanted, without gathering it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh import _torch
from convmesh.sharding.layout import Layout
from convmesh.sharding.redistribute import move, move_beside, place
from tests.cases import place as placed
from tests.gathers import Sizes
from tests.harness import Pool

Case = tuple[tuple[Any, ...], tuple[Any, ...]]


def check(mesh: DeviceMesh, case: Case) -> None:
    before, after = case
    whole = torch.arange(3 * 5 * 7, dtype=torch.float64).view(3, 5, 7)
    source, wanted = placed(whole, mesh, before), placed(whole, mesh, after)
    target = Layout.of(_torch.spec_of(wanted))
    with convmesh.enable(), Sizes() as sizes:
        result = place(source.to_local(), Layout.of(_torch.spec_of(source)), target)
        parts = [move(source, target), move_beside(source, target)]
    assert result is not None
    assert result.placements == wanted.placements
    assert result.to_local().is_contiguous()
    for part in (result.to_local(), *parts):
        assert torch.equal(part, wanted.to_local())
    assert sizes.largest < whole.nbytes


def test_another_dimension_is_cut(pool: Pool) -> None:
    pool.run_cases(check, [((1,), (2,)), ((2,), (0,)), ((0,), (1,))], mesh=(3,))
    pool.run_cases(check, [((0, 1), (0, 2)), ((0, 1), (2, 1)), (("R", 2), ("R", 1)), ((1, 0), (2, 0))], mesh=(2, 2))
