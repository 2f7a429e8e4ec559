"""Vmapped contractions of DTensors.

If only mapped and batch dimensions are sharded, every rank computes its own samples, with any algorithm. Otherwise they
are folded into one convolution, whose rules make the necessary exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm
from typing import cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from .. import _torch
from ..sharding.layout import dense_stride
from .contraction import Contraction, Role
from .folding import Mapped, Operand
from .machines import Ranks

Compute = Callable[[Contraction, int, Operand, Operand, Mapped | None, Ranks], Mapped]


def by_own_samples(
    product: Contraction, batch: int, first: Operand, second: Operand, bias: Mapped | None, compute: Compute
) -> Mapped | None:
    """Run `compute` on local tensors; None if a sample is not on one rank."""
    operands: list[tuple[Role | None, Mapped]] = [(first.role, first.mapped), (second.role, second.mapped)]
    operands += [] if bias is None else [(None, bias)]
    specs = [_torch.spec_of(cast(DTensor, mapped.value)) for _, mapped in operands]
    mesh = specs[0].mesh
    if any(spec.mesh != mesh or not _torch.plain_order(spec) for spec in specs) or mesh.get_coordinate() is None:
        return None
    along = [_placed(product.wanted, operands, [s.placements[i] for s in specs]) for i in range(mesh.ndim)]
    placements = tuple(placement for placement in along if placement is not None)
    if len(placements) < mesh.ndim:
        return None
    parts = [Mapped(_torch.local_of(cast(DTensor, mapped.value)), mapped.dim) for _, mapped in operands]
    own_batch = next(part.value.shape[part.dim] for part in parts if part.dim is not None)
    own = _with_batch(product, next(p.sample_shape[0] for (r, _), p in zip(operands, parts, strict=True) if _has_N(r)))
    a, b = Operand(first.role, parts[0]), Operand(second.role, parts[1])
    placed = tuple(placement for spec in specs for placement in spec.placements)
    ranks = Ranks.that_share(mesh, placed, (product, batch, placed))
    result = compute(own, own_batch, a, b, None if bias is None else parts[2], ranks).in_front.contiguous()
    shape = (batch, *product.shape(product.wanted))
    stride = dense_stride(shape, torch.contiguous_format)
    return Mapped(_torch.wrap(result, _torch.make_spec(mesh, placements, shape, stride, result.dtype)), 0)


def _placed(
    wanted: Role, operands: Sequence[tuple[Role | None, Mapped]], placements: Sequence[Placement]
) -> Placement | None:
    """Return the placement of the result `[B ...]` over a mesh dimension, if ranks compute with local tensors."""
    if all(placement == Replicate() for placement in placements):
        return Replicate()
    samples = [Replicate() if mapped.dim is None else Shard(mapped.dim) for _, mapped in operands]
    if list(placements) == samples:
        return Shard(0)
    batches = [Shard(int(mapped.dim == 0)) if _has_N(role) else Replicate() for role, mapped in operands]
    if list(placements) == batches:
        return Partial() if wanted is Role.KERNEL else Shard(1)
    return None


def _has_N(role: Role | None) -> bool:  # noqa: N802
    """Whether an operand has a batch dimension N: images and responses have, a kernel or bias (None) has not."""
    return role is not None and "N" in role.value


def _with_batch(product: Contraction, N: int) -> Contraction:
    return replace(product, image=(N, *product.image[1:]), response=(N, *product.response[1:]))


def expressible(
    product: Contraction, batch: int, first: Operand, second: Operand, bias: Mapped | None
) -> tuple[int, Operand, Operand, Mapped | None]:
    """Return an equivalent contraction whose folded dimensions are still plain shards, perhaps with more samples.

    Uneven shards cannot be merged with an inner dimension: they are filled up with samples of zeros, locally. If one
    operand alone cannot be folded, samples become groups, and the other operand is repeated for each sample.
    """
    mapped = [operand for operand in (first, second) if operand.is_mapped]
    if len(mapped) == 1 and _merges_behind(product, mapped[0]):
        first, second = (each if each.is_mapped else _repeated(each, batch) for each in (first, second))
    ranks = lcm(*(each.ranks for each in (first.mapped, second.mapped, bias) if each is not None))
    missing = -batch % ranks
    if missing:
        first, second = (Operand(each.role, _filled(each.mapped, missing)) for each in (first, second))
        bias = None if bias is None else _filled(bias, missing)
    return batch + missing, first, second, bias


def _merges_behind(product: Contraction, operand: Operand) -> bool:
    """Whether a sharded mapped dimension would become an inner one: behind groups, or a sharded batch."""
    (letter,) = set(operand.role.value) & set(product.wanted.value)
    behind = operand.mapped.is_sharded_along(0) if letter == "N" else product.geometry.groups > 1
    return operand.mapped.ranks > 1 and behind


def _repeated(operand: Operand, batch: int) -> Operand:
    return Operand(operand.role, Mapped(operand.value.expand(batch, *operand.value.shape), 0))


def _filled(mapped: Mapped, missing: int) -> Mapped:
    if mapped.dim is None:
        return mapped
    behind = mapped.value.ndim - 1 - mapped.dim
    return Mapped(F.pad(mapped.value, [0, 0] * behind + [0, missing]), mapped.dim)


def without_filling(result: Mapped, batch: int) -> Mapped:
    assert result.dim is not None
    if result.value.shape[result.dim] == batch:
        return result
    return Mapped(result.value.narrow(result.dim, 0, batch), result.dim)
