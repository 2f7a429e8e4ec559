"""What is known of memory that holds a copy which torch takes for a view: where it was taken from, and writes so far.

A part of a sharded dimension is a new tensor, and so is a tensor that was redistributed to be reshaped. autograd
believes that they are views, and so do users. So the memory of such a copy knows where it was taken from, and how it
goes back there; `view_writeback` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from .assign import Place

Take = Callable[[DTensor], DTensor]
PutBack = Callable[[DTensor, DTensor], DTensor] | None
"""The full tensor with the part in its place; None for copies that are not to be written into."""

_NOTES = "_convmesh_notes"
anything_noted = False  # of any memory yet: in most programs nothing ever is


@dataclass
class Notes:
    """A piece of memory: writes so far, what it is a copy of, copies taken of it."""

    writes: int = 0
    origin: Origin | None = None
    copies: int = 0
    ahead: bool = False  # written, and not put back yet: such a copy is not refreshed
    compiled: bool = False  # a copy that compiled code has returned: nobody knows of what


@dataclass
class Origin:
    """What a copy is a copy of. It keeps that memory, as a view does: were it not to, ranks could differ in whether
    it is still there, and those that write to it would wait for the others."""

    memory: torch.UntypedStorage
    full: Place
    part: Place
    take: Take
    put_back: PutBack
    seen: int  # how often the full tensor had been written when the part was last like it
    read_by_users: bool
    kind: type[torch.Tensor]  # of its local tensor; in a trace another one than that of what came from outside


def notes_of(tensor: object) -> Notes | None:
    """Of a DTensor's local tensor."""
    notes: Notes | None = _torch.noted(tensor, _NOTES)
    return notes


def notes_of_local(local: object) -> Notes | None:
    notes: Notes | None = _torch.notes_of(local, _NOTES)
    return notes


def made_notes(memory: torch.UntypedStorage) -> Notes:
    """Of any memory; new ones if it has none."""
    notes: Notes | None = getattr(memory, _NOTES, None)
    if notes is None:
        global anything_noted
        anything_noted, notes = True, Notes()
        setattr(memory, _NOTES, notes)
    return notes


def mark(part: DTensor, full: DTensor, take: Take, put_back: PutBack, read_by_users: bool = True) -> bool:
    """Note that `part` is a copy of some of `full`, also while a graph is traced."""
    local, copy = _torch.local_of(full), _torch.local_of(part)
    noted = _torch.takes_notes(copy) and _torch.takes_notes(local)
    if noted:
        memory = local.untyped_storage()
        if copy.untyped_storage() is memory:  # nothing had to move on this rank: then it copies what others receive
            copy = copy.clone(memory_format=torch.preserve_format)
            _torch.relocate(part, copy, _torch.spec_of(part))
        above = made_notes(memory)
        above.copies += read_by_users
        made_notes(copy.untyped_storage()).origin = Origin(
            memory, Place.of(full), Place.of(part), take, put_back, above.writes, read_by_users, type(local)
        )
    return noted


def is_copy(local: torch.Tensor) -> bool:
    notes = notes_of_local(local)
    return notes is not None and notes.origin is not None


def mark_compiled(local: torch.Tensor) -> None:
    """Note that compiled code has returned a copy, and that a write into it would reach nothing else."""
    made_notes(local.untyped_storage()).compiled = True


def hand_on(before: DTensor, after: DTensor) -> None:
    """Note that `after`, which has memory of its own, is a copy of what `before` is a copy of."""
    notes, memory = notes_of(before), _torch.local_of(after).untyped_storage()
    if notes is not None and notes.origin is not None and notes_of(after) is not notes:
        made_notes(memory).origin = replace(notes.origin, part=Place.of(after))
        made_notes(notes.origin.memory).copies += notes.origin.read_by_users


def is_up_to_date(part: DTensor, full: DTensor) -> bool:
    """Whether a copy is one of this tensor, which no operator has written since."""
    notes = notes_of(part)
    origin = None if notes is None else notes.origin
    memory = _torch.local_of(full).untyped_storage()
    return (
        origin is not None
        and origin.memory is memory
        and origin.full == Place.of(full)
        and origin.seen == made_notes(memory).writes
    )
