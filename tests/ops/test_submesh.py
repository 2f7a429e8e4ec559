"""Meshes that leave ranks out: these call every operator too, have nothing, and neither wait nor fail."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

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
    return inside


def test_ranks_outside_of_the_mesh(pool: Pool) -> None:
    results = pool.run(check_left_out, list(FUNCTIONS), mesh=(4,))
    assert [all(result) for result in results] == [False, True, False, True]
