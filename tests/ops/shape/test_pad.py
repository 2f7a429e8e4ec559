"""Padding along sharded dimensions, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.ops._core.index_copy import DistributedCopy
from tests.cases import place
from tests.compare import same_on_all_ranks
from tests.harness import Pool
from tests.ops.against_dense import Sharded, check_elements


def pad(x: torch.Tensor, pads: tuple[int, ...], mode: str, value: float | None) -> torch.Tensor:
    return F.pad(x, pads, mode, value)


def cases(*placements: tuple[Any, ...]) -> list[Sharded]:
    constant = [((1, 2, 0, 3), 2.5), ((-1, 2, 3, -2), 1.0), ((0, 9, 9, 0), 1.0), ((1, 1, 1, 1, 1, 1, 0, 2), 3.0)]
    borders = [((1, 2, 0, 3), mode) for mode in ("reflect", "replicate", "circular")]
    borders += [((-1, 2, 3, -2), mode) for mode in ("reflect", "replicate", "circular")]
    borders += [((4, 4, 4, 4), "reflect"), ((9, 9, 9, 9), "replicate"), ((4, 0, 5, 1), "circular")]
    made = []
    for at in placements:
        x = (((2, 3, 5, 7), at),)
        made += [Sharded(pad, x, (pads, "constant", value)) for pads, value in constant]
        made += [Sharded(pad, x, (pads, mode, None)) for pads, mode in borders]
    return made


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2,), [(3,), (2,), (0,), ("P",), (1,)]),
        ((4,), [(3,), (1,)]),
        ((2, 2), [(2, 3), (0, 3), (3, 3), ("P", 2)]),
    ],
)
def test_padding_is_that_of_one_process(pool: Pool, mesh: tuple[int, ...], placements: list[Any]) -> None:
    pool.run_cases(check_elements, cases(*placements), mesh=mesh)


def test_any_number_of_dimensions(pool: Pool) -> None:
    made = [
        Sharded(pad, ((shape, (len(shape) - 1,)),), ((2, 1) * spatial, mode, None))
        for mode in ("reflect", "replicate", "circular", "constant")
        for spatial, shape in ((1, (2, 9)), (1, (1, 2, 9)), (2, (2, 4, 5)), (3, (2, 3, 4, 5)), (3, (1, 1, 3, 4, 5)))
    ]
    pool.run_cases(check_elements, made, mesh=(2,))


def pad_with_zeros_of_either_sign(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """Which are equal, and yet not the same."""
    x = torch.ones(2, 5)
    with convmesh.enable():
        for zero in (0.0, -0.0, 0.0):
            padded = F.pad(place(x, mesh, at), (1, 2), value=zero).full_tensor()
            assert torch.equal(padded.signbit(), F.pad(x, (1, 2), value=zero).signbit())


def test_zeros_of_either_sign(pool: Pool) -> None:
    pool.run_cases(pad_with_zeros_of_either_sign, [(0,), (1,), ("R",)], mesh=(2,))


def by_one_kernel(mesh: DeviceMesh, case: Sharded) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedCopy, "__call__", None)  # nothing is copied piece by piece
        check_elements(mesh, case)


def test_what_needs_no_other_rank_is_padded_by_one_kernel(pool: Pool) -> None:
    made = {
        mesh: [
            Sharded(pad, ((shape, at),), (pads, mode, None))
            for mode in ("reflect", "replicate")
            for shape, at, pads in cut
        ]
        for mesh, cut in {
            (2,): [
                ((2, 3, 6, 8), (3,), (1, 1, 1, 1)),
                ((2, 3, 6, 8), (2,), (3, 0, 2, 2)),
                ((2, 3, 9), (2,), (0, 1)),
                ((3, 8), (1,), (2, 2)),
                ((1, 2, 4, 4, 6), (4,), (-1, -1, 2, 0, 0, 1)),
            ],
            (2, 2): [((2, 3, 6, 8), (2, 3), (2, 2, 1, 1)), ((2, 4, 6, 8), (1, 3), (2, 2, 1, 0))],
        }.items()
    }
    for mesh, samples in made.items():
        pool.run_cases(by_one_kernel, samples, mesh=mesh)


def refused(mesh: DeviceMesh, case: tuple[tuple[int, ...], str]) -> str:
    pads, mode = case
    with convmesh.enable():
        x = place(torch.ones(1, 2, 4, 6), mesh, (3,))
        with pytest.raises(convmesh.ShardingError) as error:
            F.pad(x, pads, mode)
        assert F.pad(x, (1, 1), "constant").shape[3] == 8
    return str(error.value)


def test_bad_padding_is_refused_alike_on_all_ranks(pool: Pool) -> None:
    bad = [((6, 0, 0, 0), "reflect"), ((-7, 0), "constant"), ((7, 0, 0, 0), "circular"), ((-3, -3, 0, 0), "replicate")]
    for messages in pool.run_cases(refused, bad, mesh=(2,)):
        same_on_all_ranks(messages)
