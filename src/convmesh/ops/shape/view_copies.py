"""Copies of a part of a sharded dimension, which torch takes for views."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ...sharding import registry, view_writeback

aten = torch.ops.aten


def copy_of(part: DTensor, whole: DTensor, take: view_writeback.Take, put_back: view_writeback.PutBack) -> DTensor:
    """`part`, a copy of some of `whole`, of which writes are put back."""
    if view_writeback.mark(part, whole, take, put_back):
        registry.guard_writes()
    return part
