"""functorch's levels and wrappers: the only file of this package that uses private names of torch."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from enum import Enum
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from .._torch import is_lazy

# Tested one by one, so that a torch release that renames one says so by name.
PRIVATE_NAMES = (
    "torch._C._functorch.maybe_current_level",
    "torch._C._functorch._unwrap_batched",
    "torch._C._functorch._add_batch_dim",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.is_gradtrackingtensor",
    "torch._C._functorch.get_unwrapped",
    "torch._C._ExcludeDispatchKeyGuard",
    "torch._C._len_torch_dispatch_stack",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey.FuncTorchBatched",
    "torch._C.DispatchKey.FuncTorchDynamicLayerBackMode",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "torch.autograd.forward_ad._current_level",
    "torch.library.Library._destroy",
)

Keys = torch._C.DispatchKeySet

PLAIN_TYPES = (Tensor, torch.nn.Parameter)

_functorch = torch._C._functorch
_BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
_ALL_TRANSFORMS = _BATCHED | torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)


class Nature(Enum):
    """The kind of tensor under vmap, which decides what an algorithm may do with it."""

    PLAIN = "plain"  # ordinary storage, no dispatch mode: any algorithm
    TRACED = "traced"  # torch.compile records a graph: any algorithm, too
    TRACKED = "tracked"  # autograd records: no writing in place, no large tensors kept for backward
    SHARDED = "sharded"  # DTensors without a dispatch mode: any algorithm on local tensors
    # A DTensor under a dispatch mode, another subclass, another level of vmap, or a lazy conjugate: only algorithms of
    # dispatched operators.
    OPAQUE = "opaque"


def current_level() -> int:
    """Return the level of the innermost transform, in which a batching rule runs."""
    level = _functorch.maybe_current_level()
    if level is None:
        raise RuntimeError("a batching rule was called outside of torch.func.vmap")
    return level


def unwrap(tensor: Tensor, level: int) -> tuple[Tensor, int | None]:
    """Return the physical tensor and its mapped dimension, None if `level` does not map it."""
    return _functorch._unwrap_batched(tensor, level)


def wrap(tensor: Tensor, dim: int | None, level: int) -> Tensor:
    return tensor if dim is None else _functorch._add_batch_dim(tensor, dim, level)


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor that all transforms of torch.func have wrapped."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor without levels of gradients. Levels of vmap stay: its dimensions would be others without."""
    while _functorch.is_gradtrackingtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def below_vmap(nature: Nature) -> AbstractContextManager[None]:
    """Context manager in which operators run below the current level.

    Plain tensors may skip all levels at once, which is cheaper: no other level has wrapped them.
    """
    return cast(
        AbstractContextManager[None],
        torch._C._ExcludeDispatchKeyGuard(_ALL_TRANSFORMS if nature is Nature.PLAIN else _BATCHED),
    )


def is_watched() -> bool:
    """Whether a dispatch mode sees the operators that run, such as `FlopCounterMode`."""
    return bool(torch._C._len_torch_dispatch_stack() > 0)


def plain(*operands: tuple[Tensor, int | None] | None) -> Hashable:
    """Return a key of plain tensors: shapes, strides, mapped dimensions. The quickest test.

    None if any is not plain, or a dispatch mode is active; it may also be None for plain ones.
    """
    if forward_ad._current_level >= 0 or is_watched():
        return None
    parts: list[Hashable] = []
    for operand in operands:
        if operand is None:
            parts.append(None)
            continue
        value, dim = operand
        if type(value) not in PLAIN_TYPES or _functorch.is_functorch_wrapped_tensor(value):
            return None
        if (value.requires_grad and torch.is_grad_enabled()) or is_lazy(value):
            return None
        parts += (dim, value.shape, value.stride(), value.dtype, value.device)
    return tuple(parts)


def nature_of(*tensors: Tensor) -> Nature:
    """Return the most restrictive nature of the tensors."""
    natures = {_nature(tensor) for tensor in tensors}
    if Nature.SHARDED in natures:
        return Nature.SHARDED if len(natures) == 1 else Nature.OPAQUE
    for nature in (Nature.OPAQUE, Nature.TRACKED, Nature.TRACED):
        if nature in natures:
            return nature
    return Nature.PLAIN


def _nature(tensor: Tensor) -> Nature:
    if _functorch.is_functorch_wrapped_tensor(tensor):
        if not _functorch.is_gradtrackingtensor(tensor):
            return Nature.OPAQUE
        inner = _nature(_functorch.get_unwrapped(tensor))
        return Nature.OPAQUE if inner in (Nature.OPAQUE, Nature.SHARDED) else Nature.TRACKED
    if (tensor.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return Nature.TRACKED if _dense(tensor) else Nature.OPAQUE
    if isinstance(tensor, FakeTensor | FunctionalTensor):
        return Nature.TRACED
    if type(tensor) is DTensor:
        return Nature.SHARDED
    return Nature.PLAIN if _dense(tensor) and not is_lazy(tensor) else Nature.OPAQUE


def _dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
