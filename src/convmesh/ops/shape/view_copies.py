"""Copies of a part of a sharded dimension, which torch takes for views."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding import registry, view_writeback


def copy_of(part: DTensor, whole: DTensor, take: view_writeback.Take, put_back: view_writeback.PutBack) -> DTensor:
    """`part`, a copy of some of `whole`, of which writes are put back."""
    if view_writeback.mark(part, whole, take, put_back):
        registry.guard_writes()
    return part


def _returned(local: torch.Tensor) -> None:
    view_writeback.mark_compiled(local)
    registry.guard_writes()


registry.while_installed(lambda: _torch.mark_returned_copies(view_writeback.is_copy, _returned))
registry.while_installed(lambda: _torch.before_compiled_writes(view_writeback.check_compiled_write))
