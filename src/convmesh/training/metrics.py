"""Metrics of torchmetrics: what they collect of global tensors is global, and is not to be summed over ranks again."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..sharding.errors import ShardingError


def make_global(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let the metrics in a distributed module do without other processes, and have their methods entered."""
    for part in module.modules():
        if not (hasattr(part, "distributed_available_fn") and hasattr(part, "sync_on_compute")):
            continue
        metric: Any = part
        alone = not metric.sync_on_compute and not metric.dist_sync_on_step
        if dist.is_initialized() and mesh.size() != dist.get_world_size() and not alone:
            raise ShardingError(
                f"distribute: this {type(part).__name__} would be summed over all {dist.get_world_size()} ranks of the "
                f"job, and the mesh has {mesh.size()} of them, which have the same value\n"
                "  remedy: make it with sync_on_compute=False, and combine the values of several meshes yourself"
            )
        metric.distributed_available_fn = _never
        # Its wrappers of `update` and `compute` are around methods that do not enter the model; a copy makes new ones.
        for name in ("update", "compute"):
            vars(metric).pop(name, None)
        metric.__setstate__(metric.__getstate__())


def _never() -> bool:
    return False
