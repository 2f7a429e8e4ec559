"""Copies that torch takes for views: what is written into them is put back into the tensors that they are copies of.

A part of a sharded dimension is a new tensor, and so is a tensor that was moved to be reshaped. autograd believes that
they are views, and so do users. So the memory of such a copy knows where it was taken from. Every operator that writes
passes by here: before it the copy is brought up to date, if the other tensor was written in the meantime, and after it
the values go back. This holds for all views of the copy too, which share its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from .dispatch import move
from .errors import refuse
from .layout import Layout

Take = Callable[[DTensor], DTensor]
PutBack = Callable[[DTensor, DTensor], DTensor]
"""The whole with the part in its place."""

_NOTES = "_convmesh_notes"


@dataclass
class Notes:
    """What is known of a piece of memory: how often it was written, and what it is a copy of."""

    writes: int = 0
    origin: Origin | None = None


@dataclass(frozen=True)
class Place:
    """A DTensor that can be made again from its memory."""

    spec: _torch.Spec
    dtype: torch.dtype
    storage: Callable[[], torch.UntypedStorage | None]
    geometry: tuple[int, tuple[int, ...], tuple[int, ...]]

    @staticmethod
    def of(tensor: DTensor, keep: bool = False) -> Place:
        """Its memory is not kept alive: when it goes nobody can see what is written. Unless it is only a step on the
        way to other memory, as a part of a part is."""
        local = _torch.local_of(tensor)
        geometry = int(local.storage_offset()), tuple(local.shape), tuple(local.stride())
        storage = local.untyped_storage()
        return Place(_torch.spec_of(tensor), local.dtype, (lambda: storage) if keep else ref(storage), geometry)

    def local(self) -> torch.Tensor | None:
        storage = self.storage()
        if storage is None:
            return None
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, *self.geometry)


@dataclass
class Origin:
    whole: Place
    part: Place
    take: Take
    put_back: PutBack
    seen: int = field(default=0)  # how often the whole had been written when the part was last like it


def mark(part: DTensor, whole: DTensor, take: Take, put_back: PutBack) -> bool:
    """Note that `part` is a copy of some of `whole`. A compiler makes functions of writes, and needs no notes."""
    plain = type(_torch.local_of(part)) is torch.Tensor and type(_torch.local_of(whole)) is torch.Tensor
    if plain:
        above = _made(whole)
        kept = Place.of(whole, keep=above.origin is not None)
        _made(part).origin = Origin(kept, Place.of(part), take, put_back, above.writes)
    return plain


def is_copy(local: torch.Tensor) -> bool:
    notes = getattr(local.untyped_storage(), _NOTES, None)
    return notes is not None and notes.origin is not None


def _made(tensor: DTensor) -> Notes:
    storage = _torch.local_of(tensor).untyped_storage()
    notes: Notes | None = getattr(storage, _NOTES, None)
    if notes is None:
        notes = Notes()
        setattr(storage, _NOTES, notes)
    return notes


def tracked(operator: _torch.Operator, handler: _torch.Handler) -> _torch.Handler:
    """The handler of an operator that writes, with what has to be done before and after."""
    known = _torch.signature(operator)
    first_only = known.written == {0} and 0 not in known.lists

    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if first_only and _torch.noted(args[0], _NOTES) is None and not args[0]._is_view():
            return handler(operator, args, kwargs)  # nearly always
        targets = [args[0]] if first_only else list(_written(known, args, kwargs))
        for target in targets:
            _before(target)
        result = handler(operator, args, kwargs)
        for target in targets:
            notes = _torch.noted(target, _NOTES)
            if notes is not None:
                _after(notes)
        return result

    return run


def _written(known: _torch.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for number in sorted(known.written):
        value = args[number] if number < len(args) else kwargs.get(known.names[number])
        yield from value if isinstance(value, list | tuple) else (value,)


def _before(target: Any) -> None:
    notes = _torch.noted(target, _NOTES)
    if notes is not None and notes.origin is not None:
        _refresh(notes.origin)
    elif isinstance(target, DTensor) and target._is_view():
        base = target._base
        if base is not None and not _torch.shares_memory(target, base):
            raise refuse("an operator that writes in place", "would write into a copy that torch takes for a view",
                         (("target", target), ("whole", base)),
                         "clone it first, or use the operator that returns a new tensor")  # fmt: skip


def _refresh(origin: Origin) -> None:
    whole, part = origin.whole.local(), origin.part.local()
    if whole is None or part is None:
        return
    notes: Notes = getattr(whole.untyped_storage(), _NOTES)
    if notes.origin is not None:
        _refresh(notes.origin)
    if origin.seen != notes.writes:
        taken = origin.take(_torch.wrap(whole, origin.whole.spec))
        part.copy_(move(taken, Layout.of(origin.part.spec)))
        origin.seen = notes.writes


def _after(notes: Notes) -> None:
    notes.writes += 1
    origin = notes.origin
    if origin is None:
        return
    whole, part = origin.whole.local(), origin.part.local()
    if whole is None or part is None:
        return  # nobody can see it any more
    written = origin.put_back(_torch.wrap(whole, origin.whole.spec), _torch.wrap(part, origin.part.spec))
    whole.copy_(move(written, Layout.of(origin.whole.spec)))
    above: Notes = getattr(whole.untyped_storage(), _NOTES)
    _after(above)
    origin.seen = above.writes
