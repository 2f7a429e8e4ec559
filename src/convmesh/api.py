"""The public switch."""

from __future__ import annotations

from types import TracebackType

from . import batching
from . import ops as ops  # declares the rules
from .sharding import registry


class Enabled:
    """What `enable()` returns. As a context manager it puts back, at its end, the state that it found."""

    def __init__(self, before: bool):
        self._before = before

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._before:
            disable()


def enable(*, benchmark: bool = False) -> Enabled:
    """Make the operators of convolutional networks exact on sharded DTensors, and `torch.func.vmap` over convolutions
    fast; from now on, or for a `with` block.

    With `benchmark` the first vmapped convolution of every shape tries all algorithms by the clock, in place of
    estimating what they cost: slower once, and right for the machine at hand."""
    before = registry.installed()
    registry.install()
    batching.install()
    batching.try_all(benchmark)
    return Enabled(before)


def disable() -> None:
    """Put back exactly what was there before `enable()`."""
    batching.uninstall()
    batching.try_all(False)
    registry.uninstall()
