"""Batches whose samples lie on several ranks.

Where each sample is on one rank, ranks compute their own with plain tensors, and nothing is communicated until
gradients of different samples are summed. Where samples themselves are sharded, everything stays a DTensor.
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
class Spread:
    """Where the samples of a batch are."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    batch: int
    samples_are_local: bool  # whether each sample is on one rank, or the same on several

    @classmethod
    def of(cls, batch: tuple[Tensor, ...]) -> Spread | None:
        """None for plain tensors; those beside DTensors are refused."""
        sharded = [tensor for tensor in batch if isinstance(tensor, DTensor)]
        if not sharded:
            return None
        mesh = sharded[0].device_mesh
        placements = sharded[0].placements
        samples = tuple(Shard(0) if each == Shard(0) else Replicate() for each in placements)
        if len(sharded) < len(batch) or any(tensor.device_mesh != mesh for tensor in sharded):
            raise ShardingError(
                "a batch of which some is a DTensor and some is not, or is on another mesh\n"
                "  remedy: convmesh.shard(tensor, mesh, data=0) for all of it"
            )
        if any(_samples(tensor) != samples or not _torch.plain_order(_torch.spec_of(tensor)) for tensor in sharded):
            raise ShardingError(
                f"the samples of a batch lie apart: {[tensor.placements for tensor in sharded]}\n"
                "  remedy: shard dimension 0 of all its tensors along the same mesh dimensions"
            )
        local = all(tensor.placements == samples for tensor in sharded)
        return cls(mesh, samples, sharded[0].shape[0], local)

    def own(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Parameters or buffers as plain full tensors."""
        return {name: self.everywhere(value).to_local() for name, value in tensors.items()}

    def everywhere(self, value: Tensor) -> DTensor:
        """The same on all ranks: of a plain tensor that is taken for granted."""
        replicated = [Replicate()] * self.mesh.ndim
        if isinstance(value, DTensor):
            return value.redistribute(self.mesh, replicated)
        return DTensor.from_local(value, self.mesh, replicated, run_check=False)

    def by_sample(self, own: Tensor) -> DTensor:
        """[b ...] of this rank's samples -> [B ...]"""
        return self._wrap(own, self.placements, (self.batch, *own.shape[1:]))

    def summed(self, value: Tensor, parameter: Tensor) -> DTensor:
        """The sum over all samples, with the parameter's placements; a plain tensor is the sum over this rank's own."""
        partial = tuple(Partial() if each == Shard(0) else each for each in self.placements)
        total = value if isinstance(value, DTensor) else self._wrap(value, partial, tuple(value.shape))
        target = parameter.placements if isinstance(parameter, DTensor) else [Replicate()] * self.mesh.ndim
        return total.redistribute(self.mesh, target)

    def _wrap(self, own: Tensor, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> DTensor:
        stride = dense_stride(shape, torch.contiguous_format)
        return _torch.wrap(own.contiguous(), _torch.make_spec(self.mesh, placements, shape, stride, own.dtype))


def _samples(tensor: DTensor) -> tuple[Placement, ...]:
    return tuple(Shard(0) if each == Shard(0) else Replicate() for each in tensor.placements)


def settled(output: DTensor, others: tuple[Tensor, ...]) -> DTensor:
    """Without Partial placements, and with its samples where those of the others are.

    An operator on a single sample may have left it on all ranks that had a part of the batch, if an empty one.
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
