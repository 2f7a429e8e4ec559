"""Entry points of a distributed model: calls and methods of its modules, and methods of the objects they return.

However the forward pass is entered, parameters are watched for gradients that are Partial(sum), plain inputs are
refused, and plain tensors that the code then makes are constants, the same on every rank.
"""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from .. import _torch
from ..sharding.buffer_factories import implicit_replication
from ..sharding.dtensor_attributes import NO_DDP
from ..sharding.errors import ShardingError
from ..sharding.implicit_replication import constants_belong_to
from .gradients import Gradients, own_parameters
from .methods import NAME, enter_by_methods, is_placed


class Entry:
    """Attached to a distributed module, its submodules and their results: knows whether one of them is being called."""

    def __init__(self, mesh: DeviceMesh, gradients: Gradients):
        self.mesh = mesh
        self.gradients = gradients
        self._calls: list[Any] = []  # of which objects, the outermost first
        self._outermost: tuple[int, FrameType] | None = None  # the thread and the frame in which that one runs
        self._constants: AbstractContextManager[None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        """Copy for a copy of the module. Both share the mesh: a process group cannot be copied."""
        if id(self) not in memo:
            memo[id(self)] = Entry(self.mesh, copy.deepcopy(self.gradients))
        copied: Entry = memo[id(self)]
        return copied

    def open(self, module: nn.Module) -> None:
        """Hook all entry points of a module and its submodules.

        A layer of torch creates no constants, and has no method but its call: only its parameters are watched.
        """
        self.gradients.watch(own_parameters(module))
        for part in module.modules():
            layer = type(part).__module__.startswith("torch.") and next(part.children(), None) is None
            if hasattr(part, NAME) or (layer and part is not module):
                continue
            setattr(part, NAME, self)
            constants_belong_to(part)
            part.register_forward_pre_hook(self.enter if part is module else self.enter_part, with_kwargs=True)
            part.register_forward_hook(self.leave, always_call=True)
            enter_by_methods(part)

    @property
    def inside(self) -> bool:
        return bool(self._calls) and not self._is_over()

    @_torch.never_alone
    def enter(self, target: Any, args: Any, kwargs: Any, caller: FrameType | None = None) -> None:
        if torch.compiler.is_compiling():  # the compiler tells constants by the modules that it traces
            if not _has_other_parameters(target):
                _refuse_plain(target, args, kwargs)
            return
        if self._calls and self._is_over():
            self._end()  # a keyboard interrupt, for which torch calls no hooks
        if self._calls:
            self._calls.append(target)
            return
        if isinstance(target, nn.Module):
            if _has_other_parameters(target):
                return  # a rank's own in their place, for samples of its own
            self.gradients.watch(own_parameters(target))
        if _torch.inside_ddp():
            raise ShardingError(
                f"{type(target).__name__} is distributed, and called by a DistributedDataParallel\n  remedy: {NO_DDP}"
            )
        _refuse_plain(target, args, kwargs)
        self._constants = implicit_replication(self.mesh)
        self._constants.__enter__()
        self._calls.append(target)
        self._outermost = get_ident(), caller or sys._getframe(1)

    @_torch.never_alone
    def enter_part(self, target: Any, args: Any, kwargs: Any) -> None:
        """Enter a submodule, except in compiled code: its input could be a constant that the model has created."""
        if not torch.compiler.is_compiling():
            self.enter(target, args, kwargs, sys._getframe(1))

    @_torch.never_alone
    def leave(self, target: Any, args: Any, output: Any) -> None:
        # Another hook may have raised before `enter`; this one is called all the same.
        if torch.compiler.is_compiling() or not self._calls or self._calls[-1] is not target:
            return
        self._calls.pop()
        if not self._calls:
            self._end()
            self._open_results(output)

    def _end(self) -> None:
        self._calls, self._outermost, constants, self._constants = [], None, self._constants, None
        if constants is not None:
            constants.__exit__(None, None, None)

    def _is_over(self) -> bool:
        """Whether the outermost call has ended although no hook was called."""
        if self._outermost is None or self._outermost[0] != get_ident():
            return False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost[1]:
            frame = frame.f_back
        return frame is None

    def _open_results(self, output: Any) -> None:
        """Hook the methods of returned objects that hold DTensors, such as an autoencoder's latent distribution."""
        objects = [value for value in tree_iter(output) if _is_object(value)]
        held = [tree_iter(list(vars(value).values())) for value in objects if is_dataclass(value)]
        for value in (*objects, *(value for values in held for value in values if _is_object(value))):
            if any(isinstance(attribute, DTensor) for attribute in vars(value).values()):
                vars(value)[NAME] = self
                enter_by_methods(value)


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module | type | FunctionType)


def entry_of(target: object) -> Entry | None:
    found = getattr(target, NAME, None)
    return found if isinstance(found, Entry) else None


def _has_other_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters, and none of them is a DTensor. If any is, it is nearly always the first."""
    any_at_all = False
    for parameter in module.parameters():
        if is_placed(parameter):
            return False
        any_at_all = True
    return any_at_all


def _refuse_plain(target: Any, args: Any, kwargs: Any) -> None:
    for tensor in tree_iter((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and not is_placed(tensor):
            raise ShardingError(
                f"{type(target).__name__} is distributed, and its input of shape {tuple(tensor.shape)} is a plain "
                "torch.Tensor\n"
                "  remedy: convmesh.shard(tensor, mesh, data=0, ...) if every rank has all of it, "
                "convmesh.replicate(tensor, mesh) if all are to compute all of it, convmesh.from_region(part, shape, "
                "mesh, ...) if each rank has its part"
            )
