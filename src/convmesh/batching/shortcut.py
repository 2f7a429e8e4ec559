"""Calls for which torch's own rule is the best, found again by one look-up.

Between two operators that stream through megabytes nothing of Python is left in a processor's caches: a rule's
few dozen microseconds become a few hundred then. So a call that was left to torch before goes there straight away.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from . import choice
from ._functorch import description
from .choice import LONGEST
from .machines import of_plain_tensors

_left_to_torch: set[Hashable] = set()


def key_of(operands: Sequence[torch.Tensor | None], *arguments: Hashable) -> Hashable:
    """All that a choice among algorithms depends on; None where tensors are not plain ones, or somebody watches."""
    laid = None if choice.is_watched() else description(operands)
    return None if laid is None else (laid, arguments, torch.get_num_threads(), of_plain_tensors())


def is_left_to_torch(key: Hashable) -> bool:
    """Whether such a call was left to torch before, all of it."""
    return key in _left_to_torch


def leave_to_torch(key: Hashable) -> None:
    if key is not None:
        if len(_left_to_torch) >= LONGEST:
            _left_to_torch.clear()
        _left_to_torch.add(key)


choice.when_forgotten(_left_to_torch.clear)
