"""gloo's threads, and how Linux is asked to schedule them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

THREADS = Path("/proc/self/task")
LISTENER = "gloo_tcp_loop"


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
    found = []
    with suppress(OSError):  # there may be no such folder
        for thread in THREADS.iterdir():
            with suppress(OSError):  # threads come and go
                if (thread / "comm").read_text().strip() == LISTENER:
                    found.append(int(thread.name))
    return found
