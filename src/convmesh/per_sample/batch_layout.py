"""Batches whose samples are distributed over several ranks.

If each sample is on one rank, ranks compute theirs with plain tensors, and nothing is communicated until gradients of
different samples are summed. If the samples themselves are sharded, everything stays a DTensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch
from ..sharding.errors import ShardingError
from ..sharding.layout import dense_stride


@dataclass(frozen=True)
class BatchLayout:
    """The placements of the samples of a batch."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    batch: int
    samples_are_local: bool  # each sample is on one rank, or replicated, but not itself sharded

    @classmethod
    def of(cls, batch: tuple[Tensor, ...]) -> BatchLayout | None:
        """Return None for plain tensors; a mix of plain tensors and DTensors is refused."""
        sharded = [tensor for tensor in batch if isinstance(tensor, DTensor)]
        if not sharded:
            return None
        mesh = sharded[0].device_mesh
        placements = sharded[0].placements
        samples = tuple(Shard(0) if each == Shard(0) else Replicate() for each in placements)
        if len(sharded) < len(batch) or any(tensor.device_mesh != mesh for tensor in sharded):
            raise ShardingError(
                "a batch that mixes DTensors with plain tensors, or DTensors on several meshes\n"
                "  remedy: convmesh.shard(tensor, mesh, data=0) for all of it"
            )
        if any(
            _sample_placements(tensor) != samples or not _torch.plain_order(_torch.spec_of(tensor))
            for tensor in sharded
        ):
            raise ShardingError(
                f"tensors of a batch with differently sharded samples: {[tensor.placements for tensor in sharded]}\n"
                "  remedy: shard dimension 0 of all its tensors along the same mesh dimensions"
            )
        local = all(tensor.placements == samples for tensor in sharded)
        return cls(mesh, samples, sharded[0].shape[0], local)

    def full_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters or buffers as plain full tensors."""
        return {name: self.replicated(value).to_local() for name, value in tensors.items()}

    def replicated(self, value: Tensor) -> DTensor:
        """Return a replicated DTensor; a plain tensor is assumed to be equal on all ranks."""
        replicated = [Replicate()] * self.mesh.ndim
        if isinstance(value, DTensor):
            return value.redistribute(self.mesh, replicated)
        return DTensor.from_local(value, self.mesh, replicated, run_check=False)

    def wrap_samples(self, local: Tensor) -> DTensor:
        """This rank's [b ...] -> DTensor [B ...]"""
        return self._wrap(local, self.placements, (self.batch, *local.shape[1:]))

    def sum_samples(self, value: Tensor, parameter: Tensor) -> DTensor:
        """Return the sum over all samples in the parameter's layout; a plain `value` is the sum over this rank's."""
        partial = tuple(Partial() if each == Shard(0) else each for each in self.placements)
        total = value if isinstance(value, DTensor) else self._wrap(value, partial, tuple(value.shape))
        target = parameter.placements if isinstance(parameter, DTensor) else [Replicate()] * self.mesh.ndim
        return total.redistribute(self.mesh, target)

    def _wrap(self, local: Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
        stride = dense_stride(shape, torch.contiguous_format)
        return _torch.wrap(local.contiguous(), _torch.make_spec(self.mesh, placements, shape, stride, local.dtype))


def _sample_placements(tensor: DTensor) -> tuple[Placement, ...]:
    return tuple(Shard(0) if each == Shard(0) else Replicate() for each in tensor.placements)


def without_partial(output: DTensor, others: tuple[Tensor, ...]) -> DTensor:
    """Return `output` without Partial placements, and with its samples sharded like those of the others.

    With a batch of one sample, an operator may have replicated it, also to ranks with an empty shard of the batch.
    """
    beside = next((each.placements for each in others if isinstance(each, DTensor)), output.placements)
    target = [
        Shard(0)
        if other == Shard(0) and not isinstance(each, Shard)
        else Replicate()
        if isinstance(each, Partial)
        else each
        for each, other in zip(output.placements, beside, strict=True)
    ]
    return output.redistribute(output.device_mesh, target)
