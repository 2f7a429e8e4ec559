"""The boundary of compiled code: results that are copies of a part of another tensor, and inputs that it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from .collectives import arrived
from .tensors import slot_of


class CopyMeta(TensorMeta):
    """The TensorMeta of a result that is a copy: equal to the plain one, and kept with compiled code."""


def mark_returned_copies(
    is_copy: Callable[[torch.Tensor], bool], returned: Callable[[torch.Tensor], None]
) -> Callable[[], None]:
    """Call `returned` with the local tensor of each result of compiled code that was a copy (`is_copy`) when traced.

    Returns a function that undoes this. It uses that a compiler flattens and unflattens DTensors, while it traces and
    when its code runs.
    """
    flatten, unflatten = DTensor.__tensor_flatten__, DTensor.__tensor_unflatten__

    def taken_apart(tensor: DTensor) -> Any:
        names, (placements, meta, *rest) = flatten(tensor)
        local = slot_of(tensor)
        copy = type(local) is not torch.Tensor and is_copy(local)
        return names, (placements, CopyMeta(*meta) if copy else meta, *rest)

    def put_together(inner: dict[str, Any], context: Any, size: Any, stride: Any) -> DTensor:
        made: DTensor = unflatten(inner, context, size, stride)
        if type(context[1]) is CopyMeta:
            local = arrived(slot_of(made))
            if type(local) is torch.Tensor:
                returned(local)
            else:
                assert made._spec.tensor_meta is not None
                made._spec.tensor_meta = CopyMeta(*made._spec.tensor_meta)
        return made

    _set(taken_apart, put_together)
    return lambda: _set(flatten, unflatten)


def _set(flatten: Any, unflatten: Any) -> None:
    DTensor.__tensor_flatten__ = flatten  # type: ignore[method-assign]
    DTensor.__tensor_unflatten__ = staticmethod(unflatten)  # type: ignore[method-assign]


def before_compiled_writes(check: Callable[[DTensor], None]) -> Callable[[], None]:
    """Call `check` with each DTensor that compiled code is about to write in place; return a function that undoes this.

    Such writes reach no operator's handler. But compiled code reports them to autograd before it runs.
    """
    increment_version = torch.autograd.graph.increment_version

    def told(tensor: Any) -> None:
        written = (tensor,) if isinstance(tensor, torch.Tensor) else tuple(tensor)
        for each in written:
            if isinstance(each, DTensor):
                check(each)
        increment_version(written)

    torch.autograd.graph.increment_version = told
    return lambda: setattr(torch.autograd.graph, "increment_version", increment_version)
