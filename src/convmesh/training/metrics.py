"""Metrics of torchmetrics and MONAI: what they collect of global tensors is global, and is not to be summed over ranks,
or gathered from them, again."""

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


class Collecting(Protocol):
    """What MONAI's metrics are: they collect values of each batch, and `aggregate` is of all of them."""

    def extend(self, *data: Any) -> None: ...
    def append(self, *data: Any) -> None: ...
    def get_buffer(self) -> Any: ...
    def aggregate(self, *args: Any, **kwargs: Any) -> Any: ...
    def reset(self) -> None: ...


def collect_global(metric: Any, mesh: DeviceMesh) -> None:
    """Let a metric of MONAI's keep values of global tensors, and gather none from other processes."""
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
    """The methods of such a metric by which values come and go."""

    mesh_of_values: DeviceMesh
    values: list[list[torch.Tensor]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with implicit_replication(self.mesh_of_values):  # it creates tensors of its own
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def reset(self) -> None:
        self.values = []

    def extend(self, *data: Any) -> None:
        """Batches of values, each a tensor or a list of tensors."""
        self.values = self.values or [[] for _ in data]
        for kept, batch in zip(self.values, data, strict=False):
            kept.append(_full(batch if isinstance(batch, torch.Tensor) else torch.stack(list(map(_full, batch)))))

    def append(self, *data: Any) -> None:
        """One value for each buffer."""
        self.extend(*(_full(torch.as_tensor(value)).unsqueeze(0) for value in data))

    def get_buffer(self) -> Any:
        buffers = [torch.cat(kept) for kept in self.values]
        return None if not buffers else buffers[0] if len(buffers) == 1 else buffers

    def __len__(self) -> int:
        return max((sum(map(len, kept)) for kept in self.values), default=0)


def _full(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
