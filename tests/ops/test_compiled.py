"""Every family under torch.compile(fullgraph=True): forward and backward, as the eager operator in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.families import FUNCTIONS, Example


def check_compiled(mesh: DeviceMesh, name: str) -> None:
    example = Example(name)
    with convmesh.enable():
        torch._dynamo.reset()
        placed = example.placed(mesh)
        actual = torch.compile(example.function, fullgraph=True, backend="aot_eager")(*placed)
        gradients = example.backward(actual, placed)
    assert_close(actual.full_tensor(), example.expected)
    for mine, wanted in zip(gradients, example.gradients, strict=True):
        assert_close(mine.full_tensor(), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled(pool: Pool, name: str) -> None:
    """One call each: a collective that only some ranks have kept would hang, and the name says whose it is."""
    pool.run(check_compiled, name, mesh=(2,))
