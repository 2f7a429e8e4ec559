"""Operators that nobody has written a rule for."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool


def unruled(mesh: DeviceMesh) -> str:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with convmesh.enable():
        cut, whole = place(x, mesh, (0,)), place(x, mesh, ("R",))
        assert_close(torch.pdist(whole).full_tensor(), torch.pdist(x))
        assert_close(torch.addr(cut, cut[:, 0], cut[0]).full_tensor(), torch.addr(x, x[:, 0], x[0]))
        try:
            torch.pdist(cut)
        except convmesh.ShardingError as error:
            return str(error)
    return ""


def test_taken_apart_or_refused_and_never_refused_where_every_rank_has_all(pool: Pool) -> None:
    message = same_on_all_ranks(pool.run(unruled, mesh=(4,)))
    assert message.startswith("_pdist_forward: there is no rule")
    assert "remedy: replicate them" in message
