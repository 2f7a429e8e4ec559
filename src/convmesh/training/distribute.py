"""A model on a mesh: the same parameters on all ranks, gradients summed while backward runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._pytree import tree_iter

from .. import _torch
from ..api import enable
from ..batching import innermost
from ..comm import BUCKET_BYTES
from ..sharding.buffer_factories import implicit_replication
from ..sharding.dtensor_attributes import NO_DDP
from ..sharding.errors import ShardingError
from ..sharding.implicit_replication import constants_belong_to
from . import idle_optimizers
from .gradients import Gradients
from .random_state import share_random_state

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_NAME = "_convmesh"


def distribute(module: AnyModule, mesh: DeviceMesh, *, bucket_bytes: int = BUCKET_BYTES) -> AnyModule:
    """Replicate a module on a mesh, in place, and let convmesh all-reduce its gradients.

    Parameters and buffers become replicated DTensors with the values of the first rank. All ranks also take the random
    state of the first rank. The rules are switched on (`convmesh.enable()`).

    Gradients are all-reduced (summed) over the mesh in buckets while backward runs. When `backward()` returns, every
    `.grad` has the layout of its parameter. Because a loss of DTensors is the loss of the *global* batch, this sum is
    the gradient that one device would compute: you need not rescale it. See [From DDP](from-ddp.md).

    Create the optimizer after this call: the module has new parameters.

    Tensors that the module creates in its forward pass are taken as equal on all ranks. If your loss creates tensors (a
    one-hot target, a window), make it an `nn.Module` and call `distribute` on it as well.

    Args:
        module: Any module. It must have values: neither lazy nor on the meta device.
        mesh: The mesh. Ranks must ascend along each of its dimensions, as `init_device_mesh` arranges them.
        bucket_bytes: The approximate size of one all-reduce.

    Returns:
        The same module.

    Raises:
        ShardingError: The module is distributed already, has lazy or meta parameters, or has DTensors on another mesh.
            Later, from the forward pass: an input is a plain tensor, or the module is wrapped in
            DistributedDataParallel.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(3, 8, 3, padding=1), mesh)
        >>> x = convmesh.shard(torch.randn(4, 3, 8, 8), mesh, data=0, h=2)
        >>> model(x).square().mean().backward()
        >>> model.weight.grad.placements  # the same gradient on every rank
        (Replicate(), Replicate())
    """
    _check(module, mesh)
    enable()
    before = list(module.parameters())
    _replicate(module, mesh)
    idle_optimizers.remember(module, (tensor for tensor in before if not isinstance(tensor, DTensor)))
    share_random_state(mesh)
    state = Distributed(mesh, Gradients(bucket_bytes))
    setattr(module, _NAME, state)
    constants_belong_to(module)
    module.register_forward_pre_hook(state.enter, with_kwargs=True)
    module.register_forward_hook(state.leave, always_call=True)
    module.register_load_state_dict_pre_hook(state.place_loaded)
    return module


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Skip the all-reduce of gradients, to accumulate them over several backward passes.

    Within the block gradients stay `Partial(sum)` and add up locally. The first backward pass after the block
    all-reduces the total. This is `DistributedDataParallel.no_sync` for a distributed module.

    Args:
        module: A module that was given to `distribute`.

    Raises:
        ShardingError: The module is not distributed.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 1, 3), mesh)
        >>> micro_batches = torch.ones(2, 2, 1, 8, 8)
        >>> with convmesh.no_sync(model):
        ...     (model(convmesh.shard(micro_batches[0], mesh, data=0, h=2)).mean() / 2).backward()
        >>> (model(convmesh.shard(micro_batches[1], mesh, data=0, h=2)).mean() / 2).backward()
        >>> model.bias.grad.full_tensor().tolist()
        [1.0]
    """
    state = getattr(module, _NAME, None)
    if not isinstance(state, Distributed):
        raise ShardingError("no_sync: this module is not distributed\n  remedy: convmesh.distribute(module, mesh)")
    before, state.gradients.paused = state.gradients.paused, True
    try:
        yield
    finally:
        state.gradients.paused = before


class Distributed:
    """What a distributed module carries: its hooks."""

    def __init__(self, mesh: DeviceMesh, gradients: Gradients):
        self.mesh = mesh
        self.gradients = gradients
        self._entered: list[AbstractContextManager[None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        """For a copy of the module, which is on the same mesh: a process group cannot be copied."""
        if id(self) not in memo:
            memo[id(self)] = Distributed(self.mesh, copy.deepcopy(self.gradients))
        copied: Distributed = memo[id(self)]
        return copied

    @_torch.never_alone
    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        has_parameters = next(module.parameters(), None) is not None
        if has_parameters and not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            return  # called with other parameters in their place: a rank's own, for samples of its own
        if not torch.compiler.is_compiling() and _torch.inside_ddp():
            raise ShardingError(
                f"{type(module).__name__} is distributed, and called by a DistributedDataParallel\n  remedy: {NO_DDP}"
            )
        for tensor in tree_iter((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and not isinstance(_innermost(tensor), DTensor):
                raise ShardingError(
                    f"{type(module).__name__} is distributed, and its input of shape {tuple(tensor.shape)} is a plain "
                    "torch.Tensor\n"
                    "  remedy: convmesh.shard(tensor, mesh, data=0, ...) if every rank has all of it (replicated where "
                    "no dimension is named), convmesh.from_region(part, shape, mesh, ...) if each rank has its part"
                )
        if torch.compiler.is_compiling():
            return  # which tensors are constants the compiler knows by the modules that it is in
        self.gradients.watch(_own_parameters(module))
        self._entered.append(implicit_replication(self.mesh))
        self._entered[-1].__enter__()

    @_torch.never_alone
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling() and self._entered:
            self._entered.pop().__exit__(None, None, None)

    def place_loaded(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Plain tensors of a checkpoint that are about to be loaded become what the module has: replicated DTensors,
        with the first rank's values, as in `distribute`."""
        named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, mine in named:
            loaded = state_dict.get(prefix + name)
            if not isinstance(loaded, torch.Tensor) or isinstance(loaded, DTensor) or not isinstance(mine, DTensor):
                continue
            if loaded.shape == mine.shape and all(isinstance(placement, Replicate) for placement in mine.placements):
                state_dict[prefix + name] = _placed(loaded.to(mine.device), self.mesh)


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Without the transforms of torch.func around it, of which dynamo shows nothing."""
    return tensor if torch.compiler.is_compiling() else innermost(tensor)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those whose gradients nobody else looks after: FSDP reduces the ones that it has sharded, also over our mesh."""
    sharded = {
        id(parameter) for part in module.modules() if isinstance(part, FSDPModule) for parameter in part.parameters()
    }
    return [parameter for parameter in module.parameters() if id(parameter) not in sharded]


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if hasattr(module, _NAME):
        raise ShardingError(f"distribute: this {type(module).__name__} is distributed already\n  remedy: do it once")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if torch.nn.parameter.is_lazy(tensor):
            raise ShardingError(
                f"distribute: {name} is made by the first forward pass, and has no shape yet\n"
                "  remedy: run the module once on a small input before distributing it"
            )
        if tensor.is_meta and _torch.has_values(mesh):
            raise ShardingError(
                f"distribute: {name} is on the meta device and has no values\n"
                "  remedy: module.to_empty(device=...) and initialise it before distributing it"
            )
        if isinstance(tensor, DTensor) and tensor.device_mesh != mesh:
            raise ShardingError(
                f"distribute: {name} is a DTensor on another mesh, {tensor.device_mesh}\n"
                "  remedy: distribute the whole model on one mesh"
            )


def _replicate(module: nn.Module, mesh: DeviceMesh) -> None:
    """Once for each tensor: where modules share one, they go on sharing it."""
    done: dict[int, torch.Tensor] = {}

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in done:
            done[id(tensor)] = _placed(tensor, mesh)
        return done[id(tensor)]

    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, name, placed(parameter))
        for name, buffer in owner.named_buffers(recurse=False, remove_duplicate=False):
            setattr(owner, name, placed(buffer))


def _placed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    # This broadcasts the first rank's values, so that ranks with another start cannot slip in.
    moved = distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)
    if not isinstance(tensor, nn.Parameter):
        return moved
    parameter = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # marks that a training script has put on it, such as "no weight decay"
    return parameter
