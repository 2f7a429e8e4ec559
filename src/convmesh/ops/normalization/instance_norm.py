"""Instance norm: group norm with a group for every channel. torch would flatten batch and channels for it."""

from __future__ import annotations

import torch

from ...sharding.registry import composite
from .group_norm import BEHAVIOUR


@composite("instance_norm", BEHAVIOUR)
def instance_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool,
) -> torch.Tensor:  # fmt: skip
    input = input.contiguous()  # as on one device
    if not use_input_stats:
        return torch.batch_norm(input, weight, bias, running_mean, running_var, False, momentum, eps, cudnn_enabled)
    if running_mean is not None or running_var is not None:
        with torch.no_grad():
            var, mean = torch.var_mean(input.detach(), tuple(range(2, input.dim())))
            for running, value in ((running_mean, mean), (running_var, var)):
                if running is not None:
                    running.mul_(1 - momentum).add_(value.mean(0).to(running.dtype) * momentum)
    return torch.group_norm(input, input.shape[1], weight, bias, eps, cudnn_enabled)
