"""The same training step with PhysicsNeMo's ShardTensor, if it is installed (`pip install .[physicsnemo]`)."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module


def installed() -> bool:
    return importlib.util.find_spec("physicsnemo") is not None


def make_step(
    build: Callable[[], nn.Module], x: torch.Tensor, target: torch.Tensor, mesh: DeviceMesh
) -> Callable[[], None]:
    """A training step with the first spatial dimension cut, which has been run once."""
    warnings.simplefilter("ignore")
    from physicsnemo.domain_parallel import ShardTensor

    def cut(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        if dim >= tensor.dim():
            return ShardTensor.from_local(tensor, mesh, [Replicate()], sharding_shapes={})
        parts = tensor.chunk(mesh.size(), dim)
        shapes = {0: tuple(part.shape for part in parts)}  # found out by itself it needs a GPU
        return ShardTensor.from_local(parts[mesh.get_rank()].contiguous(), mesh, [Shard(dim)], sharding_shapes=shapes)

    torch.manual_seed(0)
    model = distribute_module(build(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    placed_x, placed_target = cut(x, 2), cut(target, 1)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(placed_x), placed_target).backward()
        optimizer.step()

    step()
    return step
