"""One-hot rows of labels: each label is compared with the row of all classes, which every rank knows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.implicit_replication import the_same_everywhere
from ...sharding.registry import Behaviour, composite, rule

aten = torch.ops.aten


@composite("one_hot")
def one_hot(labels: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """[...] -> [... C]"""
    if not isinstance(labels, DTensor):
        result: torch.Tensor = _torch.composite(aten.one_hot.default, (labels, num_classes), {})
        return result
    count = num_classes if num_classes >= 0 or not labels.numel() else int(labels.max().item()) + 1
    # All ranks hear of a wrong label, and raise alike.
    if labels.dtype != torch.int64 or count < 1 or (not _torch.tracing() and bool(_beyond(labels, count).item())):
        raise RuntimeError(f"one_hot: labels have to be int64 numbers of 0 to {count - 1}")
    classes = torch.arange(count, device=_torch.local_of(labels).device)
    return (labels.unsqueeze(-1) == the_same_everywhere(classes, labels.device_mesh)).to(torch.int64)


def _beyond(labels: torch.Tensor, count: int) -> torch.Tensor:
    return ((labels < 0) | (labels >= count)).any()


@rule(aten.one_hot.default, behaviour=Behaviour("all dimensions", "all-reduce of one number, for bad labels"))
def one_hot_in_inference_mode(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return one_hot(*_torch.arguments(operator, args, kwargs))
