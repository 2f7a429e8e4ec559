"""Memory that an operator's kernel needs beside what it is given and what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


def workspace(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a workspace. Kernels of convolutions copy tensors into a layout of their own, as oneDNN's do
    on CPUs and cuDNN's as a rule: forward one after the other, and for the gradient of a weight the input and the
    output's gradient at once."""
    if func.overloadpacket is aten.convolution:
        return max(map(size_of, (*given, *made)))
    if func.overloadpacket is aten.convolution_backward:
        return sum(map(size_of, given[:2]))
    return 0


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
