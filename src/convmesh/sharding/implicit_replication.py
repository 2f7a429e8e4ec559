"""Plain tensors used with DTensors: constants that a model creates in its forward pass, equal on all ranks.

Elsewhere, a plain tensor that is used with a DTensor is refused. It might be a shard, and using it as the full tensor
would be silently wrong: with a batch of one sample per rank, even the shapes would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_iter, tree_map_only

from .. import _torch
from . import view_writeback
from .errors import PlainTensor, ShardingError

# By id, by which the compiler names them.
_modules: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def constants_belong_to(module: nn.Module) -> None:
    """Take plain tensors as constants in the forward pass of a distributed module, also where it is compiled."""
    _modules[id(module)] = module


@contextmanager
def constants_allowed() -> Iterator[None]:
    """The `torch.distributed.tensor.experimental.implicit_replication` of a distributed model's forward pass."""
    before = _torch.replicates_implicitly()
    _torch.replicate_implicitly(True)
    try:
        yield
    finally:
        _torch.replicate_implicitly(before)


def allowed() -> bool:
    """Whether plain tensors are constants here. In backward they are, as they were in the forward pass."""
    return _torch.replicates_implicitly() or _torch.in_backward() or _torch.compiles_call_of(_modules)


def with_constants(handler: _torch.Handler) -> _torch.Handler:
    """Wrap a rule so that plain tensors are taken as constants where that is allowed.

    Copies that torch takes for views are refreshed first: at the same operator on all ranks, whichever local tensors
    the rule then reads on each.
    """

    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if view_writeback.watching_reads:
            view_writeback.refresh(args, kwargs)
        try:
            return handler(operator, args, kwargs)
        except PlainTensor:
            if not allowed():
                raise
        return handler(operator, *replicated(operator._schema.name, args, kwargs))

    return run


def replicated(
    operator: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its plain tensors replaced by replicated DTensors."""
    mesh = next(leaf.device_mesh for leaf in tree_iter((args, kwargs)) if isinstance(leaf, DTensor))

    def wrap(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        if tensor.requires_grad:
            raise ShardingError(
                f"{operator}: a plain tensor of shape {tuple(tensor.shape)} beside DTensors requires a gradient\n"
                "  remedy: if it is a parameter, register it before convmesh.distribute(model, mesh); if something "
                "sharded was written into it, make it with x.new_zeros(...) or torch.zeros_like(x) of a sharded x"
            )
        return as_replicated(tensor, mesh)

    wrapped_args, wrapped_kwargs = tree_map_only(torch.Tensor, wrap, (args, dict(kwargs)))
    return wrapped_args, wrapped_kwargs


def as_replicated(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a plain tensor, equal on all ranks, as a replicated DTensor."""
    placements = (Replicate(),) * mesh.ndim
    spec = _torch.make_spec(mesh, placements, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return _torch.wrap(tensor, spec)
