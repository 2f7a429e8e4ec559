"""In place of a pool of processes: the ranks of a mesh in this one, which is faster, and has as many ranks as are asked
for. What a test changes of the process (a constant, torch's compiler) is no rank's own here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.harness import RankError


class Simulated:
    """With a `shape` all runs are on a mesh of it, whatever mesh they ask for."""

    def __init__(self, shape: tuple[int, ...] = ()):
        self.shape = shape

    def run(self, fn: Callable[..., Any], *args: Any, mesh: Sequence[int], timeout: float = 0) -> list[Any]:
        def on_rank(simulated: DeviceMesh) -> Any:
            torch.manual_seed(0)
            return fn(simulated, *args)

        try:
            return convmesh.simulate(on_rank, self.shape or mesh)
        except Exception as error:
            raise RankError(0, str(error), "\n".join([repr(error), *getattr(error, "__notes__", [])])) from error

    def run_cases(self, fn: Callable[..., Any], cases: Sequence[Any], mesh: Sequence[int]) -> list[list[Any]]:
        by_rank = self.run(lambda simulated: [fn(simulated, case) for case in cases], mesh=mesh)
        return [list(results) for results in zip(*by_rank, strict=True)]
