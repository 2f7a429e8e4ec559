"""Seeing whether something was gathered, and how much.

CommDebugMode counts collectives too, but not their sizes. And it puts hooks on modules, which autograd does not let an
in-place activation follow, so real networks cannot run under it.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


class Gathers(TorchDispatchMode):
    """How many all-gathers there were, and the number of elements of the largest tensor that one put together."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does itself is seen here afterwards
        result = func(*args, **(kwargs or {}))
        if "all_gather" in str(func):
            self.count += 1
            self.largest = max([self.largest, *(t.numel() for t in tree_flatten(result)[0])])
        return result
