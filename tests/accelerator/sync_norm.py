"""The kernels of synchronised batch norms, which PyTorch has for GPUs only, by other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
_library = torch.library.Library("aten", "IMPL")
_kernels: list[Callable[..., Any]] = []


def register() -> None:
    """To be called once there is the device."""
    for kernel in _kernels:
        _library.impl(kernel.__name__, kernel, "PrivateUse1")


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    _kernels.append(function)
    return function


def _wide(tensor: Tensor) -> Tensor:
    """Statistics of half-precision numbers are in float32."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _but_channels(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _by_channel(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.view(1, -1, *[1] * (like.dim() - 2))


def _check(**right: bool) -> None:
    """What a GPU's kernels take for granted, or refuse."""
    for what, so in right.items():
        if not so:
            raise RuntimeError(f"a kernel of synchronised norms does not take this: {what}")


def _dense(*tensors: Tensor) -> bool:
    """All of them have channels last, or none."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[0].dim(), torch.contiguous_format)
    formats = (torch.contiguous_format, last)
    return any(all(tensor.is_contiguous(memory_format=one) for tensor in tensors) for one in formats)


@_kernel
def batch_norm_update_stats(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    _check(empty=input.numel() > 0, gaps=_dense(input), running=running_mean is None and running_var is None)
    variance, mean = torch.var_mean(_wide(input), _but_channels(input), correction=0)
    return mean, variance


@_kernel
def batch_norm_gather_stats_with_counts(
    input: Tensor, mean: Tensor, invstd: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    momentum: float, eps: float, counts: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[ranks, channels] -> [channels], rank by rank: one that has nothing makes it all NaN."""
    scalar = input if running_mean is None else running_mean
    same = running_var is None or running_var.dtype == scalar.dtype
    _check(counts=counts.dtype == scalar.dtype, running_var=same)
    _check(mean=mean.dtype == _wide(scalar).dtype, invstd=invstd.dtype == mean.dtype)
    total = common = squares = mean.new_zeros(())
    for own, deviation, count in zip(mean, invstd, counts.to(mean.dtype), strict=True):
        factor = 1 / (total + count)
        squares = squares + (deviation.pow(-2) - eps) * count + (common - own).square() * total * count * factor
        common = total * factor * common + count * factor * own
        total = total + count
    if running_mean is not None:
        running_mean.lerp_(common.to(running_mean.dtype), momentum)
    if running_var is not None:
        running_var.lerp_((squares / (total - 1)).to(running_var.dtype), momentum)
    return common, torch.rsqrt(squares / total + eps)


@_kernel
def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    types = {tensor.dtype for tensor in (weight, bias) if tensor is not None}
    _check(empty=input.numel() > 0, gaps=_dense(input), mean={mean.dtype, invstd.dtype} == {_wide(input).dtype})
    _check(parameters=not types or types in ({input.dtype}, {mean.dtype}))
    result = (_wide(input) - _by_channel(mean, input)) * _by_channel(invstd, input)
    result = result if weight is None else result * _by_channel(_wide(weight), input)
    result = result if bias is None else result + _by_channel(_wide(bias), input)
    return result.to(input.dtype)


@_kernel
def batch_norm_backward_reduce(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None,
    input_g: bool, weight_g: bool, bias_g: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    _check(empty=input.numel() > 0, gaps=_dense(input, grad_out), gradient=grad_out.dtype == input.dtype)
    _check(weight=weight is None or weight.dtype in (input.dtype, mean.dtype))
    gradient, dims = _wide(grad_out), _but_channels(input)
    sum_dy = gradient.sum(dims)
    sum_dy_xmu = (gradient * (_wide(input) - _by_channel(mean, input))).sum(dims)
    dtype = input.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype, copy=True) if bias_g else None,
    )


@_kernel
def batch_norm_backward_elemt(
    grad_out: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None,
    sum_dy: Tensor, sum_dy_xmu: Tensor, count: Tensor,
) -> Tensor:  # fmt: skip
    _check(empty=input.numel() > 0, gaps=_dense(input, grad_out), gradient=grad_out.dtype == input.dtype)
    _check(weight=weight is None or weight.dtype == mean.dtype, count=count.dtype == torch.int32)
    total = count.sum()
    centred = _wide(input) - _by_channel(mean, input)
    slope = _by_channel(sum_dy_xmu / total * invstd.square(), input)
    gradient = (_wide(grad_out) - _by_channel(sum_dy / total, input) - centred * slope) * _by_channel(invstd, input)
    gradient = gradient if weight is None else gradient * _by_channel(_wide(weight), input)
    return gradient.to(input.dtype)
