"""Notes on storages that hold copies which torch takes for views: the origin of a copy, and the writes so far.

A part of a sharded dimension is a new tensor, and so is a tensor that was redistributed to be reshaped. autograd and
users take them for views. So the storage of such a copy has notes of what it was copied from, and how to write it back;
`view_writeback` does that.
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
"""Takes (full tensor, part), and returns the full tensor with the part written into it; None for read-only copies."""

_NOTES = "_convmesh_notes"
anything_noted = False  # whether any storage has notes yet: in most programs none ever does


@dataclass
class Notes:
    """Notes on a storage: the number of writes, what it is a copy of, and the number of copies of it."""

    writes: int = 0
    origin: Origin | None = None
    copies: int = 0
    ahead: bool = False  # written and not yet written back: such a copy is not refreshed
    compiled: bool = False  # a copy that compiled code has returned: its origin is unknown


@dataclass
class Origin:
    """The origin of a copy.

    It keeps the storage of the full tensor alive, as a view does: otherwise ranks could differ in whether that still
    exists, and those that write back to it would wait for the others.
    """

    memory: torch.UntypedStorage
    full: Place
    part: Place
    take: Take
    put_back: PutBack
    seen: int  # the number of writes to the full tensor when the part was last in sync
    read_by_users: bool
    kind: type[torch.Tensor]  # type of the full tensor's local tensor, which differs inside and outside of a trace


def notes_of(tensor: object) -> Notes | None:
    """Return the notes of the storage of a DTensor's local tensor, or None."""
    notes: Notes | None = _torch.noted(tensor, _NOTES)
    return notes


def notes_of_local(local: object) -> Notes | None:
    notes: Notes | None = _torch.notes_of(local, _NOTES)
    return notes


def made_notes(memory: torch.UntypedStorage) -> Notes:
    """Return the notes of a storage; creates them if there are none."""
    notes: Notes | None = getattr(memory, _NOTES, None)
    if notes is None:
        global anything_noted
        anything_noted, notes = True, Notes()
        setattr(memory, _NOTES, notes)
    return notes


def mark(part: DTensor, full: DTensor, take: Take, put_back: PutBack, read_by_users: bool = True) -> bool:
    """Note that `part` is a copy of some of `full`, also in a trace. Returns whether both can have notes."""
    local, copy = _torch.local_of(full), _torch.local_of(part)
    noted = _torch.takes_notes(copy) and _torch.takes_notes(local)
    if noted:
        memory = local.untyped_storage()
        if copy.untyped_storage() is memory:  # nothing was moved on this rank, but others have received copies
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
    """Note that compiled code has returned a copy whose writes would reach no other tensor."""
    made_notes(local.untyped_storage()).compiled = True


def hand_on(before: DTensor, after: DTensor) -> None:
    """Note that `after`, which has its own storage, is a copy of what `before` is a copy of."""
    notes, memory = notes_of(before), _torch.local_of(after).untyped_storage()
    if notes is not None and notes.origin is not None and notes_of(after) is not notes:
        made_notes(memory).origin = replace(notes.origin, part=Place.of(after))
        made_notes(notes.origin.memory).copies += notes.origin.read_by_users


def is_up_to_date(part: DTensor, full: DTensor) -> bool:
    """Whether `part` is a copy of `full`, which no operator has written since."""
    notes = notes_of(part)
    origin = None if notes is None else notes.origin
    memory = _torch.local_of(full).untyped_storage()
    return (
        origin is not None
        and origin.memory is memory
        and origin.full == Place.of(full)
        and origin.seen == made_notes(memory).writes
    )
