"""What is to be known of torch's fused attention on a device."""

from __future__ import annotations

import torch

from .. import _torch

# A dry run takes the fused kernel of CPUs for that of any device: all of them keep no scores.
_AS_CPUS = ("cpu", _torch.DEVICE)


def has_gradient_on_dtensors(device: torch.device) -> bool:
    """Of torch's fused kernels the one for CPUs has none."""
    return device.type not in _AS_CPUS


def cpu_kernel_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's fused kernel for CPUs does: the conditions under which torch itself would call it."""
    tensors = query, key, value
    return (
        query.device.type in _AS_CPUS
        and all(tensor.dim() == 4 for tensor in tensors)
        and torch.backends.cuda.flash_sdp_enabled()  # which is not about CUDA only
        and query.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[:2] == key.shape[:2]
        and query.shape[3] == key.shape[3]
        and key.shape == value.shape
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and 0 not in (*query.shape, *key.shape)
    )
