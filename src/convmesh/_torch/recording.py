"""Having autograd record an operator as it is, which torch would take apart before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.autograd import forward_ad

from .late import in_transform
from .names import Operator
from .tracing import tracing

_BELOW = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)  # to which autograd goes on: DTensor's own


def records_whole() -> bool:
    """Whether `recorded` can be called here: what traces, transforms or derives forwards knows other operators."""
    return not (tracing() or in_transform() or forward_ad._current_level >= 0)


def recorded(operator: Operator, args: Sequence[Any]) -> Any:
    """Call a differentiable operator of DTensors above autograd, which gets it whole, as it does of nested tensors:
    there is one node for it, and one call of the operator's gradient. Below autograd, DTensor gets it whole too."""
    return _autograd_kernel(operator).call_boxed(_BELOW, *args)


@cache
def _autograd_kernel(operator: Operator) -> Any:
    return torch.library.get_kernel(operator, "AutogradNestedTensor")
