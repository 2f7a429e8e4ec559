"""Writing into parts of a tensor, where a part of a sharded dimension is a tensor of its own.

autograd believes that a slice is a view whatever its rule returns. So a part knows the whole that it was copied from,
and what is written into it is put back there. A view of a part whose way back is not known is refused: its writes
would be lost. Where gradients are needed, torch's own error says that such views cannot be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate

from .. import _torch
from ..sharding.dispatch import move
from ..sharding.errors import refuse
from ..sharding.layout import Layout
from ..sharding.registry import Behaviour, rule

aten = torch.ops.aten

PutBack = Callable[[DTensor, DTensor], DTensor]
"""The whole with the part in its place."""

_WHOLE = "_convmesh_part_of"
INPLACE = Behaviour("indexing", "all dimensions", "a part of a sharded dimension, back to its owners",
                    "writing into other views of such a part")  # fmt: skip


def part_of(part: Any, whole: DTensor, put_back: PutBack | None) -> Any:
    """Say that `part` is a copy of some of `whole`; without `put_back` it shares the memory of a part."""
    if put_back is not None or hasattr(whole, _WHOLE):
        setattr(part, _WHOLE, (whole, put_back))
    return part


def _write_back(part: DTensor) -> None:
    found = getattr(part, _WHOLE, None)
    if found is None:
        return
    whole, put_back = found
    if put_back is not None:
        written = put_back(whole, part)
        _torch.local_of(whole).copy_(move(written, Layout.of(_torch.spec_of(whole))))
    _write_back(whole)


def _check(target: Any) -> None:
    if not isinstance(target, DTensor) or hasattr(target, _WHOLE) or not target._is_view():
        return
    base = target._base
    if base is not None and not _torch.shares_memory(target, base):
        raise refuse("an operator that writes in place", "would write into a copy of part of a sharded dimension",
                     (("target", target), ("whole", base)),
                     "index all dimensions in one expression, or use slice_scatter or select_scatter")  # fmt: skip


@rule(
    aten.copy_.default, aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor,
    aten.add_.Scalar, aten.sub_.Scalar, aten.mul_.Scalar, aten.div_.Scalar, behaviour=INPLACE,
)  # fmt: skip
def write(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check(args[0])
    result = _torch.stock(operator, args, kwargs)
    _write_back(args[0])
    return result


@rule(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, behaviour=INPLACE)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a pending sum, one rank has the value, and the others nothing to add."""
    target, *value = args
    _check(target)
    spec = _torch.spec_of(target)
    local, here = _torch.local_of(target), spec.mesh.get_coordinate()
    added_up = [m for m, p in enumerate(spec.placements) if isinstance(p, Partial) and p.reduce_op == "sum"]
    first = here is not None and not any(here[m] for m in added_up)
    local.fill_(_whole(value[0]) if value and first else 0)
    _write_back(target)
    return target


def _whole(value: Any) -> Any:
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value))
    return move(value, layout.placed((Replicate(),) * layout.mesh.ndim))
