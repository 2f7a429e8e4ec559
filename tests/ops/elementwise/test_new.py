"""New tensors of one number, made beside a tensor that is sharded or Partial."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

SHAPE = (4, 6)


def check(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    with convmesh.enable():
        x = place(torch.ones(SHAPE, dtype=torch.float64), mesh, at)
        for shape in (SHAPE, (5, 3), ()):
            for made, number in (
                (x.new_full(shape, 3.0), 3.0),
                (x.new_ones(shape), 1.0),
                (x.new_zeros(shape), 0.0),
                (x.new_empty(shape).fill_(2), 2.0),
            ):
                assert_close(made.full_tensor(), torch.full(shape, number, dtype=torch.float64))
        for made in (
            torch.ones_like(x),
            torch.full_like(x, 1.0),
            torch.zeros_like(x) + 1,
            torch.empty_like(x).fill_(1),
        ):
            assert_close(made.full_tensor(), torch.ones(SHAPE, dtype=torch.float64))
        made = x.new_ones(SHAPE)
        if "P" not in at:
            assert made.placements == x.placements


def test_new_tensors(pool: Pool) -> None:
    pool.run_cases(check, [(0,), ("R",), ("P",)], mesh=(2,))
    pool.run_cases(check, [(0, 1), (1, 1), ("P", 0), (1, "P"), ("P", "P"), ("R", 0)], mesh=(2, 2))
