"""The interface between rules and devices: functions that use torch's operators unless a device has a faster one.

Rules call these functions and never ask for a device. A faster implementation has a condition on the arguments. Where
all ranks must choose alike, the choice (such as whether all have the compiled library) is an argument.
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
    """A function whose first argument is a tensor: the first implementation for its device that accepts the call."""

    def __init__(self, default: Callable[P, Result]) -> None:
        update_wrapper(self, default)
        self._default = default
        self._ways: dict[str, list[tuple[Callable[P, bool], Callable[P, Result]]]] = {}

    def on(self, device: str, when: Callable[P, bool]) -> Callable[[Callable[P, Result]], Callable[P, Result]]:
        """Declare another implementation for tensors on this type of device, used if `when(*args)` is true."""

        def declare(way: Callable[P, Result]) -> Callable[P, Result]:
            self._ways.setdefault(device, []).append((when, way))
            return way

        return declare

    def faster(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, Result] | None:
        """Return the implementation that would run, or None if it is torch's operators."""
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
    """Whether operators on this tensor are synchronous: on CPUs, while not compiling. Values can be read at once."""
    return tensor.is_cpu and not _torch.tracing()
