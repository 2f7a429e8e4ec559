"""Ways into a distributed model: calls of it and of its submodules, their methods, and those of what they return.

However the forward pass is entered, parameters are watched for gradients that are Partial(sum), plain inputs are
refused, and plain tensors that the code then makes are constants, the same on every rank.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import is_dataclass
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from .. import _torch
from ..batching import innermost
from ..sharding.buffer_factories import implicit_replication
from ..sharding.dtensor_attributes import NO_DDP
from ..sharding.errors import ShardingError
from ..sharding.implicit_replication import constants_belong_to
from .gradients import Gradients, own_parameters

_NAME = "_convmesh"


class Entry:
    """What a distributed module, its submodules and their results carry: whether one of them is being called."""

    def __init__(self, mesh: DeviceMesh, gradients: Gradients):
        self.mesh = mesh
        self.gradients = gradients
        self._calls: list[Any] = []  # of which objects, the outermost first
        self._constants: AbstractContextManager[None] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        """For a copy of the module, which is on the same mesh: a process group cannot be copied."""
        if id(self) not in memo:
            memo[id(self)] = Entry(self.mesh, copy.deepcopy(self.gradients))
        copied: Entry = memo[id(self)]
        return copied

    def open(self, module: nn.Module) -> None:
        """Watch all ways into a module and its submodules. A layer of torch makes no constants, and has no method but
        its call: only its parameters are watched."""
        self.gradients.watch(own_parameters(module))
        for part in module.modules():
            layer = type(part).__module__.startswith("torch.") and next(part.children(), None) is None
            if hasattr(part, _NAME) or (layer and part is not module):
                continue
            setattr(part, _NAME, self)
            constants_belong_to(part)
            part.register_forward_pre_hook(self.enter if part is module else self.enter_part, with_kwargs=True)
            part.register_forward_hook(self.leave, always_call=True)
            _enter_by_methods(part)

    @property
    def inside(self) -> bool:
        return bool(self._calls)

    @_torch.never_alone
    def enter(self, target: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # which tensors are constants it knows by the modules that it is in
            if not _has_other_parameters(target):
                _refuse_plain(target, args, kwargs)
            return
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

    @_torch.never_alone
    def enter_part(self, target: Any, args: Any, kwargs: Any) -> None:
        """Within a compiled call nobody tells a submodule's input from a constant."""
        if not torch.compiler.is_compiling():
            self.enter(target, args, kwargs)

    @_torch.never_alone
    def leave(self, target: Any, args: Any, output: Any) -> None:
        # A hook of somebody else may have raised before `enter`, and this is called all the same.
        if torch.compiler.is_compiling() or not self._calls or self._calls[-1] is not target:
            return
        self._calls.pop()
        if not self._calls and self._constants is not None:
            self._constants.__exit__(None, None, None)
            self._constants = None
            self._open_results(output)

    def _open_results(self, output: Any) -> None:
        """Of objects that hold DTensors, such as the distribution of a variational autoencoder's latents, methods may
        make constants, too."""
        objects = [value for value in tree_iter(output) if _is_object(value)]
        held = [tree_iter(list(vars(value).values())) for value in objects if is_dataclass(value)]
        for value in (*objects, *(value for values in held for value in values if _is_object(value))):
            if any(isinstance(attribute, DTensor) for attribute in vars(value).values()):
                vars(value)[_NAME] = self
                _enter_by_methods(value)


def _is_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, torch.Tensor | nn.Module | type | FunctionType)


def entry_of(target: object) -> Entry | None:
    found = getattr(target, _NAME, None)
    return found if isinstance(found, Entry) else None


def _has_other_parameters(module: nn.Module) -> bool:
    """None of them is a DTensor: where one is, it is nearly always the first."""
    any_at_all = False
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            return False
        any_at_all = True
    return any_at_all


def _refuse_plain(target: Any, args: Any, kwargs: Any) -> None:
    for tensor in tree_iter((args, kwargs)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and not isinstance(_innermost(tensor), DTensor):
            raise ShardingError(
                f"{type(target).__name__} is distributed, and its input of shape {tuple(tensor.shape)} is a plain "
                "torch.Tensor\n"
                "  remedy: convmesh.shard(tensor, mesh, data=0, ...) if every rank has all of it, "
                "convmesh.replicate(tensor, mesh) if all are to compute all of it, convmesh.from_region(part, shape, "
                "mesh, ...) if each rank has its part"
            )


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Without the transforms of torch.func around it, of which dynamo shows nothing."""
    return tensor if torch.compiler.is_compiling() else innermost(tensor)


def _enter_by_methods(target: Any) -> None:
    """Give an object a class of the same name whose methods enter the model that it belongs to."""
    kind: type = type(target)
    if isinstance(target, nn.Module) and kind.__module__.startswith("torch."):
        return
    try:
        target.__class__ = _entering(kind)
    except TypeError:
        return  # classes with __slots__, for example, cannot be exchanged


@cache
def _entering(kind: type) -> type:
    names = (name for name in dir(kind) if not name.startswith("_") and not hasattr(nn.Module, name))
    found = {name: inspect.getattr_static(kind, name) for name in names}
    methods = {
        name: (_entering_generator if inspect.isgeneratorfunction(method) else _entering_method)(method)
        for name, method in found.items()
        if isinstance(method, FunctionType) and not inspect.iscoroutinefunction(method)
    }
    if not methods:
        return kind

    def reduce(self: Any, protocol: Any) -> Any:
        """By the class that it had, which pickle can find: it enters again where it belongs to a model."""
        make, args, *rest = super(made, self).__reduce_ex__(protocol)  # type: ignore[arg-type]
        return _remade, (make, tuple(kind if value is made else value for value in args)), *rest

    members = {**methods, "__reduce_ex__": reduce, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (kind,), members)
    return made


def _entering_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        entry = entry_of(self)
        if entry is None or entry.inside or not _enters(self, args, kwargs):
            return method(self, *args, **kwargs)
        entry.enter(self, args, kwargs)
        result = None
        try:
            result = method(self, *args, **kwargs)
        finally:
            entry.leave(self, args, result)
        return result

    return run


def _entering_generator(method: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Generator[Any, Any, Any]]:
    """It is in the model while it runs, and its user is not."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = method(self, *args, **kwargs)
        go: Callable[[Any], Any] = generator.send
        value: Any = None
        step = _entering_method(lambda *_, **__: go(value))
        while True:
            try:
                made = step(self, *args, **kwargs)
            except StopIteration as end:
                return end.value
            try:
                go, value = generator.send, (yield made)
            except GeneratorExit:
                generator.close()
                raise
            except BaseException as error:
                go, value = generator.throw, error

    return run


def _enters(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether a method computes with DTensors. A module's that gets plain tensors only may be for anything, and where
    they meet the module's own they are refused."""
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return not (isinstance(target, nn.Module) and tensors) or any(isinstance(_innermost(t), DTensor) for t in tensors)


def _remade(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = make(*args)
    _enter_by_methods(made)
    return made
