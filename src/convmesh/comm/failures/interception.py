"""Interception of every collective: if one fails, the error names the ranks, the place in the code, and a remedy.

This covers the exchanges of this library, DTensor's own collectives, and both in compiled code.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from ... import _torch
from ..._torch import Operator
from ..shared_memory.mailbox import collect, collect_all, mailbox_of
from ..traffic import note_wait
from .first_failure import post

# Takes (collective, its arguments, its group), and is called before each collective of this rank.
Observer = Callable[[Operator, tuple[Any, ...], dist.ProcessGroup], None]

_observers: list[Observer] = []
_known: WeakSet[dist.ProcessGroup] = WeakSet()
# The last collectives: storage address of the result, the collective, and its group or the name of it.
_started: deque[tuple[int, Operator, dist.ProcessGroup | str]] = deque(maxlen=1024)
# Files whose frames are not the user's own code; `functools` stands between those of this library, and threads
# begin in `threading`.
_FOLDERS = Path(torch.__file__).parent, Path(__file__).parents[2]
_LIBRARIES = (*map(str, _FOLDERS), functools.__file__, threading.__file__, "<")


class CommunicationError(RuntimeError):
    """A communication failed: a rank has ended, has stopped, or took longer than the timeout.

    The message names the ranks, the mesh dimension, the operator, the line of your code, and what the first rank that
    failed has said. It is a `RuntimeError`. End all ranks when it is raised: see
    [Checkpoints and failures](reliability.md).
    """


def keep_watch() -> Callable[[], None]:
    """Start to intercept collectives; return a function that stops it."""
    _torch.workers_rest_before_exit()
    end_watch = _torch.intercept_collectives(_start, _await)

    def end() -> None:
        try:
            collect_all()  # without interception, nothing would collect these messages
        finally:
            end_watch()

    return end


def observe(observer: Observer) -> Callable[[], None]:
    """Have `observer` called before each collective; return a function that stops it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def _start(operator: Operator, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
    group = _torch.group_called(args[-1])
    if group not in _known:
        _torch.inherit_timeout(group, _first(args).device.type)
        _torch.keep_listeners_from_interrupting()
        _known.add(group)
    for observer in _observers:
        observer(operator, args, group)
    try:
        mailbox = mailbox_of(group) if operator is _torch.ALL_TO_ALL and args[0].is_cpu else None
        result = run() if mailbox is None else mailbox.post(*args[:3])
    except RuntimeError as error:
        raise _failure(_torch.name_of(operator), group, error) from error
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        _started.append((_torch.memory_of(tensor), operator, args[-1]))
    return result


def _first(args: tuple[Any, ...]) -> torch.Tensor:
    """Return the tensor that a collective was given, or the first of them."""
    found: torch.Tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
    return found


def _await(tensor: torch.Tensor, run: Callable[[], Any]) -> Any:
    start = perf_counter()
    try:
        collect(tensor)
        return run()
    except RuntimeError as error:
        for memory, operator, group in reversed(_started):
            if memory == _torch.memory_of(tensor):
                raise _failure(_torch.name_of(operator), _torch.group_called(group), error) from error
        raise _failure("a collective", None, error) from error
    finally:
        note_wait(perf_counter() - start)


def _failure(collective: str, group: dist.ProcessGroup | None, error: RuntimeError) -> CommunicationError:
    among = "a group of ranks" if group is None else describe(group)
    operator = running_operator()
    what = f"{collective} among {among}{f' in {operator}' if operator else ''}"
    first, silent = post(what, () if group is None else dist.get_process_group_ranks(group))
    # Where all ranks of the group have posted, they were waiting for a rank of another group.
    missing = f"  no word from: rank {', '.join(map(str, silent))}\n" if silent else ""
    return CommunicationError(
        f"{what} failed: a rank of this group, or one that a rank of it was waiting for, has ended, stopped or taken "
        f"longer than the time-out\n"
        f"  on rank {dist.get_rank()}, at {caller() or 'an unknown location'}\n"
        f"{f'  the first failure was that of {first}{chr(10)}' if first else ''}"
        f"{missing}"
        f"  reason: {error}\n"
        f"  remedy: look for the first error in the other ranks' output, end all ranks, and start again from the last "
        f"checkpoint; if a rank was only slow, give init_process_group a longer timeout"
    )


def describe(group: dist.ProcessGroup) -> str:
    """Return a group's ranks, and its mesh dimension, as text."""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    desc = str(group.group_desc)
    named = f" (mesh dimension {desc.removeprefix('mesh_')!r})" if desc.startswith("mesh_") else ""
    return f"ranks {ranks}{named}"


def caller(innermost: FrameType | None = None) -> str | None:
    """Return where in the user's code this is, or where `innermost` is: "file:line" of the innermost user frame.

    A user frame is one outside of torch and this library. None in threads that have none, such as autograd's own.
    """
    for frame in _frames(innermost):
        if not is_library(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return None


def is_library(file: str) -> bool:
    """Whether a file is part of torch or of this library, or was generated by the compiler."""
    return file.startswith(_LIBRARIES) or "torchinductor" in file


def running_operator() -> str | None:
    """Return the aten operator that a rule of this library, or DTensor itself, is running; None in compiled code."""
    for frame in _frames():
        for value in frame.f_locals.values():
            if isinstance(value, Operator) and value.namespace == "aten":
                return str(value)
    return None


def _frames(innermost: FrameType | None = None) -> Iterator[FrameType]:
    frame: FrameType | None = innermost or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
