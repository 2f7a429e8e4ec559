"""What Python does with a DTensor apart from operators, and torch's DTensor loses or refuses.

`tensor.data = other` changes nothing there, and says nothing. A number in a format string is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from .errors import PlainTensor, refuse
from .layout import is_plain, is_sum
from .registry import while_installed


def _get_data(tensor: DTensor) -> Any:
    return _torch.whole_data.__get__(tensor)


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """The wrapper takes over what torch knows of the other, and with it this rank's part and where it lies."""
    if not isinstance(value, DTensor):
        raise refuse("tensor.data = value", "the value is a plain torch.Tensor", [("tensor", tensor), ("value", value)],
                     "make it a DTensor: convmesh.shard(value, mesh, ...)", PlainTensor)  # fmt: skip
    _torch.whole_data.__set__(tensor, value)
    _torch.relocate(tensor, _torch.local_of(value), _torch.eager_spec_of(value))


def _format(tensor: DTensor, spec: str) -> str:
    """As of any tensor with one number; of a pending sum a rank alone does not know it."""
    known = all(is_plain(placement) and not is_sum(placement) for placement in tensor.placements)
    return format(tensor.item(), spec) if tensor.dim() == 0 and known else object.__format__(tensor, spec)


while_installed(lambda: _torch.give_attributes({"data": property(_get_data, _set_data), "__format__": _format}))
