"""Writing values into a DTensor, also into a Partial one, and recreating a DTensor from its storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast
from weakref import ref

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from .. import _torch
from .layout import Layout, is_sum
from .plan_cache import planned
from .redistribute import move


@dataclass(frozen=True)
class Place:
    """A DTensor's spec and its position in its storage, from which it can be recreated."""

    spec: _torch.Spec
    dtype: torch.dtype
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]] = (0, (), ())
    is_conj: bool = False  # whether the tensor is a lazy conjugate, or a lazy negative
    is_neg: bool = False
    traced: ref[torch.Tensor] | None = None  # a traced tensor itself, which cannot be recreated

    @staticmethod
    def of(tensor: DTensor) -> Place:
        local = _torch.local_of(tensor)
        if type(local) is not torch.Tensor:
            return Place(_torch.spec_of(tensor), local.dtype, traced=_torch.kept(local))
        geometry = int(local.storage_offset()), tuple(local.shape), tuple(local.stride())
        return Place(_torch.spec_of(tensor), local.dtype, geometry, local.is_conj(), local.is_neg())

    def tensor(self, memory: torch.UntypedStorage) -> DTensor:
        if self.traced is not None:
            return _torch.wrap(cast(torch.Tensor, self.traced()), self.spec)
        local = torch.empty(0, dtype=self.dtype, device=memory.device).set_(memory, *self.geometry)
        local = local.conj() if self.is_conj else local
        return _torch.wrap(torch.ops.aten._neg_view.default(local) if self.is_neg else local, self.spec)

    def write(self, memory: torch.UntypedStorage, values: DTensor) -> None:
        assign(self.tensor(memory), values)


def assign(tensor: DTensor, values: DTensor) -> None:
    """Write values into a tensor.

    For a Partial(sum), each rank gets its shard of the values, or the first rank all of them; all other elements are
    zero. For a Partial average or extreme every rank gets all values.
    """
    target = _torch.local_of(tensor)
    source, has_it, boxes = _terms(_torch.spec_of(tensor), _torch.spec_of(values))
    local = move(values, source)
    if boxes:
        target.zero_()
    for dim, start, length in boxes:
        target = target.narrow(dim, start, length)
    target.copy_(local if has_it else _torch.tie(torch.zeros_like(local), local))


@planned
def _terms(spec: _torch.Spec, values: _torch.Spec) -> tuple[Layout, bool, tuple[tuple[int, int, int], ...]]:
    """Return how values are written into a tensor that may be Partial.

    That is: the layout the values must have; whether this rank then has any; and its region of the local tensor, as
    (dimension, start, length) of each dimension.
    """
    layout, here = Layout.of(spec), spec.mesh.get_coordinate()
    pending = [
        m for m, (p, q) in enumerate(zip(layout.placements, values.placements, strict=True))
        if isinstance(p, Partial) and p != q
    ]  # fmt: skip
    source = layout.placed(tuple(Replicate() if m in pending else p for m, p in enumerate(layout.placements)))
    sums = [m for m in pending if is_sum(layout.placements[m])]
    for m in sums:
        if type(values.placements[m]) is Shard:
            sharded = source.placed((*source.placements[:m], values.placements[m], *source.placements[m + 1 :]))
            # A rank's shard is contained in its local tensor unless that is sharded further.
            if all(
                sharded.sharded_dims[dim][: len(mesh_dims)] == mesh_dims
                for dim, mesh_dims in source.sharded_dims.items()
            ):
                source = sharded
    if here is None:
        return source, True, ()
    own = [(dim, layout.own(dim), source.own(dim)) for dim in source.sharded_dims]
    boxes = tuple((dim, part.start - held.start, len(part)) for dim, held, part in own if part != held)
    return source, not any(here[m] for m in sums if isinstance(source.placements[m], Replicate)), boxes
