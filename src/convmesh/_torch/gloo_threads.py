"""gloo's threads: how Linux is asked to schedule them, and that they come to rest before the process ends."""

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
_LOOKS = 3  # in a row that find the workers at rest
_LONGEST = 1.0  # second; a worker that waits for another rank is at rest, too


def keep_listeners_from_interrupting() -> None:
    """Let those of gloo's threads that listen for messages run when a core is free, instead of at once.

    A listener that wakes up while another of gloo's threads holds the connection asks for it again and again. Where it
    has taken that very thread's place on a core, it does so until its time slice ends: one message in ten took 4
    milliseconds instead of a half. Batch jobs, as the scheduler calls them, interrupt nobody.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in listeners():
            with suppress(OSError):  # the system may forbid it
                if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                    os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def listeners() -> list[int]:
    """By the system's numbers for them."""
    return [int(thread.name) for thread in _threads(LISTENER)]


@cache
def workers_rest_before_exit() -> None:
    """At the end of the process wait until those of gloo's threads that communicate have let go of their tensors.

    A worker tells the waiting program that a collective is done, and lets go of its tensors after that. Where it is the
    last to hold one that Python knows, it needs the interpreter for it. If that has begun to end by then, Python ends
    the thread inside of a destructor, and C++ the process: `terminate called without an active exception`.
    """
    atexit.register(_let_workers_rest)


def _let_workers_rest() -> None:
    looks, end = 0, time.monotonic() + _LONGEST
    while looks < _LOOKS and time.monotonic() < end:
        time.sleep(0.001)  # without the interpreter, which a worker may be waiting for
        looks = looks + 1 if all(_state(thread) == _AT_REST for thread in _threads(WORKER)) else 0


def _state(thread: Path) -> str:
    with suppress(OSError):  # it has ended
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
