"""Processes that do one call at a time, and are replaced when one takes too long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

MOST_OF_PROCESS = 12  # calls of a process, which then ends, and with it what libraries keep


class Worker:
    def __init__(self, work: Callable[..., Any]) -> None:
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()
        self.calls, self.begun = 0, False

    def call(self, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.started = arguments, monotonic()
        self.calls += 1
        self.connection.send(arguments)

    def returned(self, limit: float) -> Any:
        """What the call returned, or why it never will. None: not yet."""
        if self.connection.poll():
            try:
                found = self.connection.recv()
            except EOFError:
                return RuntimeError("its process died")
            if self.begun:
                return found
            self.begun, self.started = True, monotonic()  # until now it has imported
        late = self.begun and monotonic() - self.started > limit
        return TimeoutError(f"more than {limit:.0f} s") if late else None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, work: Callable[..., Any]) -> None:
    connection.send("begun")
    with suppress(EOFError):  # nobody asks any more
        while True:
            connection.send(work(*connection.recv()))


def call_all(
    work: Callable[..., Any], calls: Sequence[tuple[Any, ...]], count: int, limit: float
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The arguments of each call and what it returned, in the order in which they end.

    An exception, if a call took more than `limit` seconds or its process died. `work` returns something, and raises
    nothing."""
    waiting, idle, busy = list(calls), list[Worker](), list[Worker]()
    try:
        while waiting or busy:
            while waiting and len(busy) < count:
                busy.append(idle.pop() if idle else Worker(work))
                busy[-1].call(waiting.pop(0))
            wait([one.connection for one in busy], timeout=1)
            for one in list(busy):
                if (returned := one.returned(limit)) is None:
                    continue
                busy.remove(one)
                if isinstance(returned, Exception) or one.calls >= MOST_OF_PROCESS:
                    one.end()
                else:
                    idle.append(one)
                yield one.arguments, returned
    finally:
        for one in idle + busy:
            one.end()
