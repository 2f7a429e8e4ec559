"""Methods of a distributed model, and of the objects that it returns, enter the model as its call does."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import cache, wraps
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from ..batching import innermost

NAME = "_convmesh"


class Enters(Protocol):
    """Return the entry that is attached to a module or an object, if any."""

    @property
    def inside(self) -> bool: ...
    def enter(self, target: Any, args: Any, kwargs: Any) -> None: ...
    def leave(self, target: Any, args: Any, output: Any) -> None: ...


def is_placed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, also under transforms of torch.func, which dynamo does not show."""
    return isinstance(tensor if torch.compiler.is_compiling() else innermost(tensor), DTensor)


def enter_by_methods(target: Any) -> None:
    """Replace an object's class by a subclass of the same name, whose methods enter the model that it belongs to."""
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
        """Pickle as the original class, which pickle can find. The copy gets such a subclass again."""
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
        entry: Enters | None = getattr(self, NAME, None)
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
    """Enter the model while the generator runs, and leave it at each `yield`."""

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
    """Whether a call of this method enters the model.

    A module's method that gets plain tensors only may do anything; where these meet the parameters, they are refused.
    """
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return not (isinstance(target, nn.Module) and tensors) or any(map(is_placed, tensors))


def _remade(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    made = make(*args)
    enter_by_methods(made)
    return made
