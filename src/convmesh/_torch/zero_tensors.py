"""Tensors whose memory does not hold their values. Gradients that autograd knows to be zero have none at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from .names import Operator

# torch computes with these zeros before DTensor sees the operator; for all others it makes ordinary tensors of them.
_OPERATORS: tuple[Operator, ...] = (
    torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor,
)  # fmt: skip


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a bit says that its memory is to be negated or conjugated when read, or that there is none: zeros.

    Operators know that, but not those that pass every level of functorch at once, nor a kernel of our own.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def any_lazy(*tensors: torch.Tensor | None) -> bool:
    """Whether one of these is, of real numbers."""
    return True in [tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()) for tensor in tensors]


def give_zeros_memory() -> Callable[[], None]:
    """Beside a DTensor let such a zero be an ordinary tensor; returns what undoes that."""
    library = torch.library.Library("aten", "IMPL")
    with catch_warnings():
        filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for operator in _OPERATORS:
            library.impl(operator, _kernel(operator), "ZeroTensor", with_keyset=True, allow_override=True)
    return library._destroy


def _kernel(operator: Operator) -> Callable[..., Any]:
    before = torch.library.get_kernel(operator, "ZeroTensor")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, DTensor) for leaf in tree_iter((args, kwargs))):
            return before.call_boxed(keys, *args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, _ordinary, (args, kwargs))
        return operator(*args, **kwargs)

    return run


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor) if tensor._is_zerotensor() else tensor
