"""One rank of a mesh whose other ranks do not exist: tensors have sizes and no values, and nothing is sent."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg

from .names import Store

DEVICE = "meta"  # of such a mesh: its operators compute shapes and strides


def has_values(mesh: DeviceMesh) -> bool:
    """Whether the tensors of a mesh have values that ranks could compare; not in a dry run."""
    return mesh.device_type != DEVICE


def silent_group(options: Any) -> dist.ProcessGroup:
    """A group that sends nothing, or torch's backend for one; `options` are torch's for a new group."""
    made: Any = fake_pg._create_fake_pg(options, None)
    return made  # type: ignore[no-any-return]


def silent_store() -> Store:
    """A store for a rank that never asks it for anything."""
    made: Store = fake_pg.FakeStore()
    return made


def running_node() -> Any:
    """The node of autograd's graph whose backward pass runs on this thread, if any."""
    return torch._C._current_autograd_node()
