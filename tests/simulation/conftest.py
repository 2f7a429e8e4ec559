"""What every test of simulated ranks leaves behind: nothing."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

import convmesh
from convmesh.simulation import process_state


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """Of every test here: process groups, threads, environment, hooks and rules are as they were."""

    def state() -> list[Any]:
        module = dist.distributed_c10d
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return [
            dist.is_initialized(), dict(module._world.pg_map), module._world, module._backend, sys.excepthook,
            dict(dist.Backend._plugins), environment, torch.get_num_threads(),
            convmesh.api.installation.installed(), convmesh.batching.installed(), torch.get_default_dtype(),
            [getattr(owner, name) for owner, name in process_state.PER_RANK[:2]],
            {thread.name for thread in threading.enumerate() if thread.name.startswith("convmesh")},
        ]  # fmt: skip

    before = state()
    yield
    assert state() == before
