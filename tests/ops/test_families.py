"""A function of every family: equal to one process, forward and backward."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh import _torch
from convmesh.sharding import installation, registry
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.families import ALL_FUNCTIONS, Example


def check(mesh: DeviceMesh, name: str) -> set[str]:
    """Returns the families of the rules that ran."""
    example, known, ran = Example(name), registry.declared(), set()

    def computing(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if operator in known:
            ran.add(known[operator].family)

    with convmesh.enable():
        end = installation.observe(computing)
        try:
            placed = example.placed(mesh)
            actual = example.function(*placed)
            gradients = example.backward(actual, placed)
        finally:
            end()
        assert_close(actual.full_tensor(), example.expected)
        for mine, wanted in zip(gradients, example.gradients, strict=True):
            assert_close(mine.full_tensor(), wanted)
    return ran


def test_all_families_agree_with_one_process(pool: Pool) -> None:
    covered = set()
    for mesh in ((2,), (3,)):
        covered |= set().union(*(ran for ran, *_ in pool.run_cases(check, list(ALL_FUNCTIONS), mesh=mesh)))
    assert covered == {behaviour.family for behaviour in registry.declared().values()}, "every family has a function"
