"""Recording an operator in autograd undecomposed, where torch would decompose it first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from .late import in_transform
from .names import Operator
from .tracing import tracing

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)  # the key to which autograd redispatches: DTensor's


def records_whole() -> bool:
    """Whether `recorded` works here: not while tracing, in transforms, or in forward mode, which decompose."""
    return not (tracing() or in_transform() or forward_ad._current_level >= 0)


def recorded(operator: Operator, args: Sequence[Any]) -> Any:
    """Call a differentiable operator on DTensors through autograd undecomposed, as torch does for nested tensors.

    So it has one node, and one call of its backward operator. Below autograd, DTensor gets it undecomposed too.
    """
    return _autograd_kernel(operator).call_boxed(_BELOW, *args)


@cache
def _autograd_kernel(operator: Operator) -> Any:
    return torch.library.get_kernel(operator, "AutogradNestedTensor")
