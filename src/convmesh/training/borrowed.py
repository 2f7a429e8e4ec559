"""Modules that a dry run distributes and gives back: they may be the caller's own, made outside of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from threading import local
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch

_mine = local()  # `.borrowed` in a thread that gives back


class _Before(NamedTuple):
    """A module as it was: its class, its attributes, and the values of its tensors, where a step may change them."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    values: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, module: nn.Module, keeps_values: bool) -> Self:
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        values = [(tensor, tensor.detach().clone()) for tensor in tensors if keeps_values]
        return cls(module, type(module), {name: _kept(value) for name, value in vars(module).items()}, values)

    def give_back(self) -> None:
        self.module.__class__ = self.kind
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for tensor, value in self.values:
            tensor.detach().copy_(value)


def _kept(value: Any) -> Any:
    """Of tables of parameters, submodules and hooks a copy, since those are what changes."""
    return copy(value) if isinstance(value, dict | list | set) else value


@contextmanager
def giving_back() -> Iterator[None]:
    """Context manager at the end of which the modules that this thread has distributed are what they were before."""
    borrowed: list[_Before] = []
    _mine.borrowed = borrowed
    try:
        yield
    finally:
        del _mine.borrowed
        for before in reversed(borrowed):
            before.give_back()


def borrow(module: nn.Module, mesh: DeviceMesh) -> None:
    """Note what a module and its submodules are, in a thread that gives them back."""
    if hasattr(_mine, "borrowed"):
        _mine.borrowed += [_Before.of(part, _torch.has_values(mesh)) for part in module.modules()]
