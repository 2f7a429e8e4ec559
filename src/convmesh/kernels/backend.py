"""The interface between rules and devices: a computation of local tensors has torch's operators as its default, and a
device may have faster ways, each with a condition.

Rules call computations by name and never ask for a device. What ranks have to agree on before one of them takes another
way, such as whether all have the compiled library, is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch

from .. import _torch

P = ParamSpec("P")
Result = TypeVar("Result")

# Where the compiled library can be: elsewhere no rank asks the others for it.
COMPILED_FOR = frozenset({"cpu"})


class Kernel(Generic[P, Result]):
    """A function of a tensor, and of more: torch's operators, or the first way of the tensor's device that takes it."""

    def __init__(self, default: Callable[P, Result]) -> None:
        update_wrapper(self, default)
        self._default = default
        self._ways: dict[str, list[tuple[Callable[P, bool], Callable[P, Result]]]] = {}

    def on(self, device: str, when: Callable[P, bool]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
        """Declare another way to compute it, on tensors of this type of device, `when` that is so."""

        def declare(way: Callable[P, Result]) -> Callable[P, Result]:
            self._ways.setdefault(device, []).append((when, way))
            return way

        return declare

    def faster(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, Result] | None:
        """What computes this, if not torch's operators."""
        for takes, way in self._ways.get(args[0].device.type, ()):  # type: ignore[attr-defined]
            if takes(*args, **kwargs):
                return way
        return None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Result:
        for takes, way in self._ways.get(args[0].device.type, ()):  # type: ignore[attr-defined]
            if takes(*args, **kwargs):  # as in `faster`, without a call that takes as long as this
                return way(*args, **kwargs)
        return self._default(*args, **kwargs)


def synchronous(tensor: torch.Tensor) -> bool:
    """Whether an operator on it has run when it returns, so that its errors are raised and its values can be read
    without waiting for a device: on CPUs, outside of a compiler."""
    return tensor.is_cpu and not _torch.tracing()
