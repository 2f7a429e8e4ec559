"""Running a function on ranks that have the stand-in accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from tests.accelerator import BACKEND
from tests.launch import launch


def waits_for_all(mesh: DeviceMesh, fn: Callable[..., Any], *args: Any) -> Any:
    """What nobody waits for keeps its memory for ever."""
    result = fn(mesh, *args)
    assert not (left := torch._C._distributed_c10d._get_work_registry_size()), f"{left} communications not waited for"
    return result


def results(fn: Callable[..., Any], *args: Any, mesh: tuple[int, ...] = (2,)) -> list[Any]:
    """Of the module-level `fn(mesh, *args)`, by rank; all of them have to return."""
    names = ("h", "w")[: len(mesh)]
    outcomes = launch(waits_for_all, fn, *args, mesh=mesh, names=names, backend=BACKEND)
    failed = {outcome.message or f"exit code {outcome.exit_code}" for outcome in outcomes if outcome.exit_code != 0}
    assert not failed, "\n".join(failed)
    return [outcome.result for outcome in outcomes]
