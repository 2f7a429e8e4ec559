"""Write-back for copies that torch takes for views: keeps them and the tensors they were copied from consistent.

The storage of such a copy has notes of its origin (`copy_notes`). Every operator that writes comes through here: before
it runs, the copy is refreshed if its origin was written in the meantime, and afterwards the values are written back.
This covers all views of the copy too, as they share its storage.

After the first write that may leave a copy outdated, reads are watched as well (`watching_reads`): every rule refreshes
its arguments first, and so does any other access to a local tensor. A refresh communicates. So it is decided by counts
of writes, which are the same on all ranks, and never by whether a copy is still referenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from .. import _torch
from . import copy_notes
from .copy_notes import Notes, Origin, made_notes, notes_of, notes_of_local
from .errors import refuse

watching_reads = False
_stop_watching: list[Callable[[], None]] = []


def check_compiled_write(target: DTensor) -> None:
    """Refuse a write by compiled code into a copy or into a tensor that was copied from: the other would not change."""
    notes = notes_of(target)
    if notes is not None and (notes.copies or notes.compiled or notes.origin is not None):
        raise _changes_one_only(target)


def _changes_one_only(target: DTensor) -> Exception:
    return refuse("a compiled function", "writes in place into a slice of a sharded dimension, or into a tensor that "
                  "was sliced so. The slice is a copy, and the other one would not change", (("target", target),),
                  "slice within the compiled function, or write outside of it")  # fmt: skip


def put_back(part: DTensor) -> bool:
    """Write the values of a copy back after a write into it outside of any operator. Returns False if it is no copy."""
    notes = notes_of(part)
    if notes is None or notes.origin is None:
        return False
    _after(_torch.local_of(part).untyped_storage())
    return True


def tracked(operator: _torch.Operator, handler: _torch.Handler) -> _torch.Handler:
    """Wrap the handler of an operator that writes: refresh its targets before, and write copies back afterwards."""
    known = _torch.signature(operator)
    first_only = known.written == {0} and 0 not in known.lists

    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        noted = copy_notes.anything_noted
        if not noted and not (args[0]._is_view() if first_only else _has_view(known, args, kwargs)):
            return handler(operator, args, kwargs)  # the usual case
        targets = (args[0],) if first_only else tuple(_written(known, args, kwargs))
        if noted and not any(map(_is_of_others, targets)):
            return handler(operator, args, kwargs)
        if len(targets) > 1 and _are_of_one(targets):
            return _one_by_one(operator, args, kwargs, len(targets))
        for target in targets:
            _before(target)
        writes = [_writes(target) for target in targets]
        result = handler(operator, args, kwargs)
        # A handler that worked on a copy of the target has already written it back.
        written = [
            notes
            for target, before in zip(targets, writes, strict=True)
            if (notes := notes_of(target)) is not None and notes.writes == before
        ]
        for notes in written:  # mark all before the first write-back, which would make the others look outdated
            notes.ahead = True
        for target in targets:
            notes = notes_of(target)
            if notes is not None and notes.ahead:
                _after(_torch.local_of(target).untyped_storage())
        return result

    return run


def _are_of_one(targets: Iterable[Any]) -> bool:
    """Whether several targets are parts of one tensor and some are copies, so that they may overlap."""
    noted = [(target, notes) for target in targets if (notes := notes_of(target)) is not None]
    roots = [_root(_torch.local_of(target).untyped_storage()) for target, _ in noted]
    copies = any(notes.origin is not None for _, notes in noted)
    return copies and len({id(root) for root in roots}) < len(roots)


def _root(memory: torch.UntypedStorage) -> Notes:
    """Return the notes of the storage that a copy, or a copy of a copy, was taken from."""
    notes = made_notes(memory)
    return notes if notes.origin is None else _root(notes.origin.memory)


def _one_by_one(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> None:
    """Run an operator on lists one entry after the other, in the order of one device."""

    def at(place: int, value: Any) -> Any:
        return [value[place]] if isinstance(value, list | tuple) and len(value) == count else value

    for place in range(count):
        operator(*(at(place, value) for value in args), **{name: at(place, value) for name, value in kwargs.items()})


def _is_of_others(target: Any) -> bool:
    """Whether a write into `target` may concern other tensors: it is a noted copy or origin, or a view."""
    return notes_of(target) is not None or _is_view(target)


def _is_view(target: Any) -> bool:
    return target is not None and target._is_view()


def _has_view(known: _torch.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of the tensors that are written is one. An optimizer has hundreds."""
    for number in known.written:
        value = args[number] if number < len(args) else kwargs.get(known.names[number])
        if any(map(torch.Tensor._is_view, value)) if isinstance(value, list | tuple) else _is_view(value):
            return True
    return False


def _written(known: _torch.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for number in sorted(known.written):
        value = args[number] if number < len(args) else kwargs.get(known.names[number])
        yield from value if isinstance(value, list | tuple) else (value,)


def _writes(target: Any) -> int:
    notes = notes_of(target)
    return 0 if notes is None else notes.writes


def _before(target: Any) -> None:
    notes = notes_of(target)
    if notes is not None and notes.compiled:
        raise refuse("an operator that writes in place", "would write into a copy that compiled code has returned, and "
                     "not into what that is a part of", (("target", target),),
                     "return a clone of the part from the compiled function, or write within it")  # fmt: skip
    if notes is not None and notes.origin is not None:
        _check_put_back(target, notes.origin)
        _refresh(_torch.local_of(target).untyped_storage(), notes.origin)
    elif isinstance(target, DTensor) and target._is_view() and target.numel():
        base = target._base
        if base is not None and not _torch.shares_memory(target, base):
            raise _writes_into_a_copy(target, base)


def _check_put_back(target: DTensor, origin: Origin) -> None:
    """What is written goes back to where it was taken from, and on from there."""
    if origin.put_back is None:
        raise _writes_into_a_copy(target, origin.full.tensor(origin.memory))
    above = made_notes(origin.memory).origin
    if above is not None:
        _check_put_back(target, above)


def _writes_into_a_copy(target: DTensor, full: torch.Tensor) -> Exception:
    return refuse("an operator that writes in place", "would write into a copy that torch takes for a view",
                  (("target", target), ("full", full)),
                  "clone it first, or use the operator that returns a new tensor")  # fmt: skip


def refresh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refresh outdated copies among the arguments of an operator, while reads are watched."""
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, DTensor):
            refresh_memory(_torch.slot_of(leaf))


def refresh_memory(local: Any) -> None:
    notes = notes_of_local(local)
    if notes is None or notes.origin is None or not _is_stale(notes.origin):
        return
    if type(local) is not torch.Tensor or not _torch.in_a_trace():  # a trace reads when its compiled code runs, not now
        _refresh(local.untyped_storage(), notes.origin)


def _is_stale(origin: Origin) -> bool:
    above = made_notes(origin.memory)
    return origin.seen != above.writes or (above.origin is not None and _is_stale(above.origin))


def _refresh(memory: torch.UntypedStorage, origin: Origin) -> None:
    """Update a copy if its origin was written since the copy was made or last refreshed."""
    if made_notes(memory).ahead:
        return
    above = made_notes(origin.memory)
    if above.origin is not None:
        _refresh(origin.memory, above.origin)
    if origin.seen != above.writes:
        with _torch.resolving():
            values = origin.take(origin.full.tensor(origin.memory))
            origin.seen = above.writes
            origin.part.write(memory, values)
        made_notes(memory).writes += 1


def _after(memory: torch.UntypedStorage, through_a_copy: bool = False) -> None:
    """Write the values of a copy back to its origin, and on to the origin of that."""
    notes = made_notes(memory)
    notes.writes += 1
    if notes.copies > through_a_copy and not watching_reads:
        _watch_reads()
    origin = notes.origin
    if origin is not None:
        full, part = origin.full.tensor(origin.memory), origin.part.tensor(memory)
        if not _torch.is_traced(_torch.local_of(full)):
            raise _changes_one_only(part)
        assert origin.put_back is not None, "such a copy is not written into"
        with _torch.resolving():
            values = origin.put_back(full, part)
        if type(_torch.local_of(values)) is not origin.kind:
            raise _changes_one_only(part)
        origin.full.write(origin.memory, values)
        _after(origin.memory, origin.read_by_users)
        origin.seen = made_notes(origin.memory).writes
    notes.ahead = False


def _watch_reads() -> None:
    global watching_reads
    watching_reads = True
    _stop_watching.append(_torch.before_local_tensors(refresh_memory))


def stop_watching_reads() -> None:
    global watching_reads
    watching_reads = False
    while _stop_watching:
        _stop_watching.pop()()
