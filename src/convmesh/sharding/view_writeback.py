"""Copies that torch takes for views: writes into them go back to the tensors that they are copies of, and reading them
shows what was written there.

The memory of such a copy knows where it was taken from (`copy_notes`). Every operator that writes passes by here:
before it the copy is refreshed, if its origin was written in the meantime, and after it the values go back. This holds
for all views of the copy too, which share its memory.

From the first write on that may leave a copy behind its origin, reads are watched as well (`watching_reads`): every
rule refreshes its arguments first, and so does whatever else asks for a local tensor. A refresh communicates. Counts of
writes decide about it, which all ranks count alike, and never whether somebody still refers to a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter

from .. import _torch
from . import copy_notes
from .copy_notes import Origin, made_notes, notes_of, notes_of_local
from .errors import refuse

watching_reads = False
_stop_watching: list[Callable[[], None]] = []


def check_compiled_write(target: DTensor) -> None:
    """Refuse that compiled code writes into a copy, or into what a copy was taken of: it would reach neither."""
    notes = notes_of(target)
    if notes is not None and (notes.copies or notes.compiled or notes.origin is not None):
        raise _changes_one_only(target)


def _changes_one_only(target: DTensor) -> Exception:
    return refuse("a compiled function", "writes in place into a tensor of which a part of a sharded dimension was "
                  "taken before, or into such a part, and would change one of them only", (("target", target),),
                  "take the part within the compiled function, or write outside of it")  # fmt: skip


def put_back(part: DTensor) -> bool:
    """After a write into a copy that no operator was seen to do: its values go back. False if it is no copy."""
    notes = notes_of(part)
    if notes is None or notes.origin is None:
        return False
    _after(_torch.local_of(part).untyped_storage())
    return True


def tracked(operator: _torch.Operator, handler: _torch.Handler) -> _torch.Handler:
    """The handler of an operator that writes, with what has to be done before and after."""
    known = _torch.signature(operator)
    first_only = known.written == {0} and 0 not in known.lists

    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        noted = copy_notes.anything_noted
        if not noted and not (args[0]._is_view() if first_only else _has_view(known, args, kwargs)):
            return handler(operator, args, kwargs)  # nearly always
        targets = (args[0],) if first_only else tuple(_written(known, args, kwargs))
        if noted and not any(map(_is_of_others, targets)):
            return handler(operator, args, kwargs)
        for target in targets:
            _before(target)
        writes = [_writes(target) for target in targets]
        result = handler(operator, args, kwargs)
        # A handler that has worked on a copy of the target has put it back itself.
        written = [
            notes
            for target, before in zip(targets, writes, strict=True)
            if (notes := notes_of(target)) is not None and notes.writes == before
        ]
        for notes in written:  # all of them, before the first that goes back leaves the others behind their origin
            notes.ahead = True
        for target in targets:
            notes = notes_of(target)
            if notes is not None and notes.ahead:
                _after(_torch.local_of(target).untyped_storage())
        return result

    return run


def _is_of_others(target: Any) -> bool:
    """Whether what is written there may be somebody else's, too."""
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
        _refresh(_torch.local_of(target).untyped_storage(), notes.origin)
    elif isinstance(target, DTensor) and target._is_view() and target.numel():
        base = target._base
        if base is not None and not _torch.shares_memory(target, base):
            raise refuse("an operator that writes in place", "would write into a copy that torch takes for a view",
                         (("target", target), ("full", base)),
                         "clone it first, or use the operator that returns a new tensor")  # fmt: skip


def refresh(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before an operator reads its arguments, while reads are watched."""
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, DTensor):
            refresh_memory(_torch.slot_of(leaf))


def refresh_memory(local: Any) -> None:
    notes = notes_of_local(local)
    if notes is None or notes.origin is None or not _is_stale(notes.origin):
        return
    if type(local) is not torch.Tensor or not _torch.in_a_trace():  # compiled code will read it, its compiler does not
        _refresh(local.untyped_storage(), notes.origin)


def _is_stale(origin: Origin) -> bool:
    above = made_notes(origin.memory)
    return origin.seen != above.writes or (above.origin is not None and _is_stale(above.origin))


def _refresh(memory: torch.UntypedStorage, origin: Origin) -> None:
    """Bring a copy up to date if what it is a copy of was written since."""
    if made_notes(memory).ahead:
        return
    above = made_notes(origin.memory)
    if above.origin is not None:
        _refresh(origin.memory, above.origin)
    if origin.seen != above.writes:
        values = origin.take(origin.full.tensor(origin.memory))
        origin.seen = above.writes
        origin.part.write(memory, values)
        made_notes(memory).writes += 1


def _after(memory: torch.UntypedStorage, through_a_copy: bool = False) -> None:
    """What was written into a copy goes back to where it was taken from, and on from there."""
    notes = made_notes(memory)
    notes.writes += 1
    if notes.copies > through_a_copy and not watching_reads:
        _watch_reads()
    origin = notes.origin
    if origin is not None:
        full, part = origin.full.tensor(origin.memory), origin.part.tensor(memory)
        if not _torch.is_traced(_torch.local_of(full)):
            raise _changes_one_only(part)
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
