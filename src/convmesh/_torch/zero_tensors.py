"""Tensors whose storage does not hold their values, such as gradients that autograd knows to be zero."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import catch_warnings, filterwarnings

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from .names import Operator

# torch evaluates these operators with zero tensors before DTensor sees them; for others it materialises the zeros.
_OPERATORS: tuple[Operator, ...] = (
    torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor,
)  # fmt: skip


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage must be negated or conjugated when it is read, or it has none, as it is all zeros.

    torch's operators handle that, but not those that pass all levels of functorch at once, nor our own kernels.
    """
    return tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor()


def any_lazy(*tensors: torch.Tensor | None) -> bool:
    """Whether one of these real tensors is lazy."""
    return True in [tensor is not None and (tensor.is_neg() or tensor._is_zerotensor()) for tensor in tensors]


def give_zeros_memory() -> Callable[[], None]:
    """Materialise zero tensors that are used with a DTensor; return a function that undoes this."""
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
