"""Metrics of torchmetrics and MONAI on global tensors: their values are global already, so ranks must not sync them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..sharding.buffer_factories import implicit_replication
from ..sharding.errors import ShardingError


def make_global(module: nn.Module, mesh: DeviceMesh) -> None:
    """Turn off syncing in the metrics of a distributed module, and let their methods be entered as those of a model."""
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
        metric.distributed_available_fn = _returns_false
        # The wrappers of `update` and `compute` call methods that do not enter the model; a copy recreates them.
        for name in ("update", "compute"):
            vars(metric).pop(name, None)
        metric.__setstate__(metric.__getstate__())


def _returns_false() -> bool:
    return False


class Collecting(Protocol):
    """The interface of MONAI's metrics: they collect values of each batch, and `aggregate` reduces all of them."""

    def extend(self, *data: Any) -> None: ...
    def append(self, *data: Any) -> None: ...
    def get_buffer(self) -> Any: ...
    def aggregate(self, *args: Any, **kwargs: Any) -> Any: ...
    def reset(self) -> None: ...


def collect_global(metric: Any, mesh: DeviceMesh) -> None:
    """Let a MONAI metric keep values of global tensors, without gathering from other processes."""
    kind = type(metric)
    if isinstance(metric, _Global) or not all(hasattr(metric, name) for name in ("extend", "append", "get_buffer")):
        state = "distributed already" if isinstance(metric, _Global) else "neither a module nor a metric"
        raise ShardingError(f"distribute: this {kind.__name__} is {state}\n  remedy: distribute modules, once")
    if dist.is_initialized() and mesh.size() != dist.get_world_size():
        raise ShardingError(
            f"distribute: this {kind.__name__} would have the values of the {mesh.size()} ranks of a mesh, and the job "
            f"has {dist.get_world_size()}\n  remedy: one mesh of all ranks, and samples that are sharded over it"
        )
    metric.__class__ = type(kind.__name__, (_Global, kind), {"__module__": kind.__module__})
    metric.mesh_of_values = mesh
    metric.reset()


class _Global:
    """Overrides the methods of a MONAI metric by which values are added and read."""

    mesh_of_values: DeviceMesh
    values: list[list[torch.Tensor]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication(self.mesh_of_values):  # the metric creates tensors
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def reset(self) -> None:
        self.values = []

    def extend(self, *data: Any) -> None:
        """Add batches of values, each a tensor or a list of tensors."""
        self.values = self.values or [[] for _ in data]
        for kept, batch in zip(self.values, data, strict=False):
            kept.append(_full(batch if isinstance(batch, torch.Tensor) else torch.stack(list(map(_full, batch)))))

    def append(self, *data: Any) -> None:
        """Add one value for each buffer."""
        self.extend(*(_full(torch.as_tensor(value)).unsqueeze(0) for value in data))

    def get_buffer(self) -> Any:
        buffers = [torch.cat(kept) for kept in self.values]
        return None if not buffers else buffers[0] if len(buffers) == 1 else buffers

    def __len__(self) -> int:
        return max((sum(map(len, kept)) for kept in self.values), default=0)


def _full(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
