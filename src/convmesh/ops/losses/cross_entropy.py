"""Cross entropy above autograd, where torch would flatten sharded space on the way to its kernels."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...sharding.registry import composite
from .elementwise import MEAN, NONE
from .nll_loss import FORWARD

aten = torch.ops.aten


@composite("nll_loss_nd", FORWARD)
def nll_loss_nd(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """The rule for `nll_loss2d_forward` takes any number of spatial dimensions, so nothing has to be flattened."""
    return _likelihood(input, target, weight, reduction, ignore_index)[0]


def _likelihood(input: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and the sum of the weights of all targets."""
    operator = aten.nll_loss_forward.default if input.dim() < 3 else aten.nll_loss2d_forward.default
    loss, weights = operator(input, *rest)
    return loss, weights


@composite("cross_entropy_loss", FORWARD)
def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    if label_smoothing == 0.0 and input.dim() > 1 and not target.is_floating_point():
        return _likelihood(torch.log_softmax(input, 1), target, weight, reduction, ignore_index)[0]
    if label_smoothing == 0.0 or target.is_floating_point():
        arguments = (input, target, weight, reduction, ignore_index, label_smoothing)
        result: torch.Tensor = _torch.composite(aten.cross_entropy_loss.default, arguments, {})
        return result
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, not {label_smoothing}")
    dim = 0 if input.dim() == 1 else 1
    logs = torch.log_softmax(input, dim)
    loss, weights = _likelihood(logs, target, weight, reduction, ignore_index)
    weighted = logs if weight is None else logs * weight.view(-1, *[1] * (input.dim() - 1 - dim))
    smooth = -weighted.sum(dim).masked_fill(target == ignore_index, 0.0)
    if reduction != NONE:
        smooth = smooth.sum()
    if reduction == MEAN:
        smooth = smooth / weights
    return (1 - label_smoothing) * loss + label_smoothing / input.shape[dim] * smooth
