"""One-hot encoding of labels: each label is compared with all classes, which every rank knows."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.implicit_replication import as_replicated
from ...sharding.registry import Behaviour, composite

ONE_HOT = Behaviour("all dimensions", "all-reduce of one value, which says whether any label is bad")


@composite("one_hot", ONE_HOT)
def one_hot(labels: DTensor, num_classes: int = -1) -> torch.Tensor:
    """`[...] -> [... C]`"""
    count = num_classes if num_classes >= 0 or not labels.numel() else int(labels.max().item()) + 1
    # The check is a sum over all ranks, so all of them raise if any has a bad label.
    known = not _torch.tracing() and _torch.has_values(labels.device_mesh)
    if labels.dtype != torch.int64 or count < 1 or (known and bool(_beyond(labels, count).item())):
        raise RuntimeError(f"one_hot: labels have to be int64 numbers of 0 to {count - 1}")
    classes = torch.arange(count, device=_torch.local_of(labels).device)
    return (labels.unsqueeze(-1) == as_replicated(classes, labels.device_mesh)).to(torch.int64)


def _beyond(labels: torch.Tensor, count: int) -> torch.Tensor:
    return ((labels < 0) | (labels >= count)).any()
