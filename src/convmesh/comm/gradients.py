"""Summing many tensors over ranks in few messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from .reduce import all_reduce

# Large enough that latency no longer matters, small enough that the copy in and out is no memory to speak of.
BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Term:
    """This rank's term of a sum over the ranks along `mesh_dims`."""

    local: torch.Tensor
    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]


def sum_in_buckets(terms: Sequence[Term]) -> list[torch.Tensor]:
    """The sums, in the order of `terms`. All ranks give theirs in the same order; what they may share is one message.

    The messages of all buckets are on their way before the first one is awaited.
    """
    buckets = list(_buckets(terms))
    started = [_start(terms, bucket) for bucket in buckets]
    sums = [term.local for term in terms]
    for bucket, flat in zip(buckets, started, strict=True):
        first = terms[bucket[0]]
        whole = all_reduce(_torch.wait(flat), first.mesh, first.mesh_dims[1:])
        parts = whole.split([terms[number].local.numel() for number in bucket])
        for number, part in zip(bucket, parts, strict=True):
            sums[number] = part.view(terms[number].local.shape).clone()  # its own memory, which the bucket's is not
    return sums


def _start(terms: Sequence[Term], bucket: Sequence[int]) -> torch.Tensor:
    # In the order of the indices and not of memory, which may differ from rank to rank.
    flat = torch.cat([terms[number].local.reshape(-1) for number in bucket])
    first = terms[bucket[0]]
    return _torch.all_reduce(flat, "sum", first.mesh.get_group(first.mesh_dims[0]))


def _buckets(terms: Sequence[Term]) -> Iterable[list[int]]:
    """The numbers of the terms that travel together: over the same ranks, in one dtype, up to a size."""
    alike: dict[object, list[int]] = {}
    for number, term in enumerate(terms):
        key = (term.mesh, term.mesh_dims, term.local.dtype, term.local.device)
        alike.setdefault(key, []).append(number)
    for numbers in alike.values():
        bucket: list[int] = []
        size = 0
        for number in numbers:
            local = terms[number].local
            bytes_here = local.numel() * local.element_size()
            if bucket and size + bytes_here > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(number)
            size += bytes_here
        yield bucket
