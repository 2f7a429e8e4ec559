"""`distribute`: replicates a model on a mesh and sums its gradients while backward runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .. import _torch
from ..api import enable
from ..comm import BUCKET_BYTES
from ..sharding.errors import ShardingError
from . import idle_optimizers
from .borrowed import borrow
from .entry import Entry, entry_of
from .gradients import Gradients
from .loaded_state import watch_loading
from .metrics import Collecting, collect_global, make_global
from .random_state import share_random_state
from .same_settings import compare_settings

AnyModule = TypeVar("AnyModule", bound=nn.Module | Collecting)


def distribute(module: AnyModule, mesh: DeviceMesh, *, bucket_bytes: int = BUCKET_BYTES) -> AnyModule:
    """Replicate a module on a mesh, in place, and let convmesh all-reduce its gradients.

    Parameters and buffers become replicated DTensors with the values of the first rank. All ranks also take the random
    state of the first rank. The rules are switched on (`convmesh.enable()`).

    Gradients are all-reduced (summed) over the mesh in buckets while backward runs. When `backward()` returns, every
    `.grad` has the layout of its parameter. Because a loss of DTensors is the loss of the *global* batch, this sum is
    the gradient that one device would compute: you need not rescale it. See [From DDP](from-ddp.md).

    Create the optimizer after this call: the module has new parameters.

    You can call the model in any way: directly, by other methods (`vae.decode(z)`, `model.generate(...)`), a submodule
    by itself, or with `torch.func.functional_call`. Tensors that the model creates there are taken as equal on all
    ranks. The same holds for methods of a returned object (`vae.encode(x).latent_dist.sample()`). If your loss creates
    tensors (a one-hot target, a window), make it an `nn.Module` and call `distribute` on it as well. Do the same with
    metrics of torchmetrics and MONAI, which then neither sum over processes nor gather from them: see
    [Around training](ecosystem.md).

    Args:
        module: Any module, or a metric. A module must have values: it is neither lazy nor on the meta device.
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
    if not isinstance(module, nn.Module):
        collect_global(module, mesh)
        enable()
        return module
    _check(module, mesh)
    borrow(module, mesh)
    enable()
    before = list(module.parameters())
    _replicate(module, mesh)
    if _torch.has_values(mesh):
        idle_optimizers.remember(module, (tensor for tensor in before if not isinstance(tensor, DTensor)))
    share_random_state(mesh)
    compare_settings(mesh)
    Entry(mesh, Gradients(bucket_bytes)).open(module)
    make_global(module, mesh)
    watch_loading(module)
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
    entry = entry_of(module)
    if entry is None:
        raise ShardingError("no_sync: this module is not distributed\n  remedy: convmesh.distribute(module, mesh)")
    before, entry.gradients.paused = entry.gradients.paused, True
    try:
        yield
    finally:
        entry.gradients.paused = before


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if entry_of(module) is not None:
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
    """Replicate each tensor once: modules that share one keep sharing it."""
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
    _torch.share_specs([[tensor for tensor in done.values() if isinstance(tensor, DTensor)]])


def _placed(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    # This broadcasts the first rank's values, so ranks cannot start from different ones.
    moved = distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)
    if not isinstance(tensor, nn.Parameter):
        return moved
    parameter = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    _torch.attach_hooks(parameter, tensor)
    parameter.__dict__.update(tensor.__dict__)  # attributes that a training script has set, such as "no weight decay"
    return parameter
