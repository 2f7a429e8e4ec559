"""gloo's threads: their scheduling on Linux, and waiting for them before the process ends."""

from __future__ import annotations

import atexit
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

THREADS = Path("/proc/self/task")
LISTENER = "gloo_tcp_loop"
WORKER = "pt_gloo_runloop"
_AT_REST = "S"
_LOOKS = 3  # consecutive looks that must find the workers at rest
_LONGEST = 1.0  # seconds; a worker that waits for another rank counts as at rest


def keep_listeners_from_interrupting() -> None:
    """Make gloo's listener threads run when a core is free instead of at once.

    A listener that wakes up while another of gloo's threads holds the connection retries in a loop. If it has preempted
    that very thread, it does so until its time slice ends: one message in ten took 4 milliseconds instead of a half.
    Threads with the scheduling policy SCHED_BATCH preempt no others.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in listeners():
            with suppress(OSError):  # the system may forbid it
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def listeners() -> list[int]:
    """Return the system's ids of the listener threads."""
    return [int(thread.name) for thread in _threads(LISTENER)]


@cache
def workers_rest_before_exit() -> None:
    """At process exit, wait until gloo's worker threads have released their tensors.

    A worker reports a collective as done before it releases its tensors. If it is the last to hold one that Python
    knows, it needs the GIL for that. If the interpreter is already shutting down, Python ends the thread inside of a
    destructor, and C++ the process: `terminate called without an active exception`.
    """
    atexit.register(_let_workers_rest)


def _let_workers_rest() -> None:
    looks, end = 0, time.monotonic() + _LONGEST
    while looks < _LOOKS and time.monotonic() < end:
        time.sleep(0.001)  # releases the GIL, which a worker may be waiting for
        looks = looks + 1 if all(_state(thread) == _AT_REST for thread in _threads(WORKER)) else 0


def _state(thread: Path) -> str:
    with suppress(OSError):  # the thread has ended
        return (thread / "stat").read_text().rpartition(")")[2].split()[0]
    return _AT_REST


def _threads(name: str) -> list[Path]:
    found = []
    with suppress(OSError):  # there may be no such folder
        for thread in THREADS.iterdir():
            with suppress(OSError):  # threads come and go
                if (thread / "comm").read_text().strip() == name:
                    found.append(thread)
    return found
