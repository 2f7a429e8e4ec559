"""`torch.autocast` for tensors without values, whose device torch's own has no lists for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_LOWER = {
    *(getattr(torch, f"conv{kind}{dims}d") for kind in ("", "_transpose") for dims in (1, 2, 3)),
    *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.matmul),
    *(torch.Tensor.__matmul__, F.linear, F.scaled_dot_product_attention, torch.prelu),
}
_LOSSES = {F.mse_loss, F.nll_loss, F.cross_entropy, F.l1_loss, F.smooth_l1_loss, F.kl_div}
_WIDE_ON_GPUS = {
    *(F.softmax, torch.softmax, torch.Tensor.softmax, F.log_softmax, torch.log_softmax, torch.Tensor.log_softmax),
    *(F.layer_norm, F.group_norm, torch.exp, torch.Tensor.exp, torch.log, torch.Tensor.log, torch.pow),
    *(torch.Tensor.pow, torch.sum, torch.Tensor.sum, torch.cumsum, torch.prod, torch.Tensor.prod),
}


class Autocast(TorchFunctionMode):
    """A mode in which `torch.autocast` for CPUs or CUDA casts the arguments of the functions that it lists."""

    computes_anew = True  # in checkpointed blocks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
        if device is not None:
            wide = function in _LOSSES or (device == "cuda" and function in _WIDE_ON_GPUS)
            goal = torch.get_autocast_dtype(device) if function in _LOWER else torch.float32 if wide else None
            if goal is not None:
                args, kwargs = tree_map_only(torch.Tensor, lambda tensor: _cast(tensor, goal), (args, kwargs))
        return function(*args, **kwargs)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor
