"""Sums of many tensors over ranks, all-reduced in few messages (buckets)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from .reduce import groups_along

# Large enough that latency no longer matters, small enough that the copies in and out need little memory and that the
# first message leaves while most of a backward pass is still to come.
BUCKET_BYTES = 25 << 20


class Term(NamedTuple):
    """This rank's term of a sum over the ranks along `mesh_dims`."""

    local: torch.Tensor
    mesh: DeviceMesh
    mesh_dims: tuple[int, ...]
    # Called with the result if the all-reduce starts before `finish`; `local` is no longer used then. Reading the
    # result waits.
    left: Callable[[torch.Tensor], None] = lambda total: None


@dataclass
class _Bucket:
    """Terms over the same ranks and of one dtype and device, which are sent in one message."""

    terms: list[tuple[int, Term]] = field(default_factory=list)
    bytes: int = 0

    def add(self, number: int, term: Term, size: int) -> None:
        self.terms.append((number, term))
        self.bytes += size


@dataclass(frozen=True)
class _Message:
    """A bucket that was sent. It keeps the shapes of its terms, but not their storage."""

    shapes: list[tuple[int, torch.Size]]
    flat: torch.Tensor
    parts: dict[int, torch.Tensor]  # views of `flat`, where the sums will be
    then: list[dist.ProcessGroup]  # groups over which the result of the first group must still be summed


class Summation:
    """Sums over ranks of tensors that are added one by one.

    A message is sent as soon as it is full, and none is awaited before `finish`. All ranks must add their terms in the
    same order, so that their messages match.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES):
        self.bucket_bytes = bucket_bytes
        self._count = 0
        self._open: dict[object, _Bucket] = {}
        self._sent: list[_Message] = []

    def add(self, term: Term) -> int:
        """Add a term, and return the index of its sum in the results of `finish`."""
        number, self._count = self._count, self._count + 1
        local = term.local
        key = (id(term.mesh), term.mesh_dims, local.dtype, local.device)
        size = local.numel() * local.element_size()
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = _Bucket()
        if bucket.terms and bucket.bytes + size > self.bucket_bytes:
            self._send(bucket)
            bucket = self._open[key] = _Bucket()
        bucket.add(number, term, size)
        if bucket.bytes >= self.bucket_bytes:
            self._send(self._open.pop(key))
        return number

    def finish(self) -> list[torch.Tensor]:
        """Return the sums in the order of their terms; the sums of one message are views of one storage."""
        for bucket in self._open.values():
            self._send(bucket, awaited=True)
        sums: dict[int, torch.Tensor] = {}
        for message in self._sent:
            whole = _torch.wait(message.flat)
            for group in message.then:
                whole = _torch.wait(_torch.all_reduce(whole, "sum", group, in_place=True))
            sums |= message.parts if whole is message.flat else _parts(whole, message.shapes)
        return [sums[number] for number in range(self._count)]

    def _send(self, bucket: _Bucket, awaited: bool = False) -> None:
        # Flattened in index order and not in storage order, which may differ between ranks.
        flat = torch.cat([_in_a_row(term.local) for _, term in bucket.terms])
        first = bucket.terms[0][1]
        groups = groups_along(first.mesh, first.mesh_dims)
        if groups:
            flat = _torch.all_reduce(flat, "sum", groups[0], in_place=True)
        shapes = [(number, term.local.shape) for number, term in bucket.terms]
        message = _Message(shapes, flat, _parts(flat, shapes), groups[1:])
        self._sent.append(message)
        if not (message.then or awaited):
            for number, term in bucket.terms:
                term.left(_torch.under_way(message.parts[number]))


def _parts(flat: torch.Tensor, shapes: Sequence[tuple[int, torch.Size]]) -> dict[int, torch.Tensor]:
    pieces = flat.split([shape.numel() for _, shape in shapes])
    return {
        number: piece if len(shape) == 1 else piece.view(shape)
        for (number, shape), piece in zip(shapes, pieces, strict=True)
    }


def _in_a_row(local: torch.Tensor) -> torch.Tensor:
    return local if local.dim() == 1 else local.reshape(-1)


def sum_in_buckets(terms: Sequence[Term]) -> list[torch.Tensor]:
    """Return the sums in the order of `terms`, each with a storage of its own."""
    summation = Summation()
    for term in terms:
        summation.add(term)
    return [total.clone() for total in summation.finish()]
