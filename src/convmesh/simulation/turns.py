"""Ranks that take turns: each runs until it waits for another, so that nothing else runs meanwhile.

So a deadlock is noticed at once, and every run is the same as the last.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from .process_state import ProcessState


class Stopped(BaseException):
    """Ends a rank without an error of its own: another one has failed, and it would wait for that forever."""


@dataclass(eq=False)
class Rank:
    """The thread of a rank, and whether it can continue."""

    number: int
    state: ProcessState
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    ready: Callable[[], bool] | None = None  # None: it can continue
    waits_for: Callable[[], str] = lambda: ""
    ended: str | None = None
    works: WeakSet[Any] = field(default_factory=WeakSet)  # communications that it has started, in whatever state


class Turns:
    """Schedules the ranks, which are threads; only one of them runs at a time."""

    def __init__(self, size: int, deadlock: Callable[[], Exception]):
        """`deadlock` returns the error for a deadlock of all ranks."""
        before = ProcessState()
        self.ranks = [Rank(number, before.forked()) for number in range(size)]
        for rank in self.ranks:
            rank.turn.acquire()
        self.errors: dict[int | None, BaseException] = {}  # None: of no single rank
        self._deadlock = deadlock
        self._over = False
        self._all_ended = threading.Event()
        self._running: Rank | None = None
        self._here = threading.local()

    def run(self, work: Callable[[int], None]) -> None:
        """Run `work` on every rank, and return when all have ended."""
        before = ProcessState()
        for rank in self.ranks:
            rank.thread = threading.Thread(
                target=self._run, args=(rank, work), name=f"convmesh-rank-{rank.number}", daemon=True
            )
            rank.thread.start()
        self.ranks[0].turn.release()
        try:
            while not self._all_ended.wait(0.2):  # a wait without timeout cannot be interrupted on every system
                pass
        except BaseException:  # KeyboardInterrupt
            self._interrupt()
            raise
        finally:
            for rank in self.ranks:
                if rank.thread is not None:
                    rank.thread.join(None if self._all_ended.is_set() else 1.0)
            before.restore()

    @property
    def current(self) -> Rank:
        """The rank whose thread calls this."""
        found: Rank | None = getattr(self._here, "rank", None)
        if found is None:
            raise RuntimeError("a simulated rank communicates from the thread that its function was called in only")
        return found

    def check(self) -> None:
        """Stop this rank if another has failed."""
        if self.errors or self._over:
            raise Stopped

    def wait(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let other ranks run until `ready()`; `waits_for` describes the condition, for the error if it never holds."""
        if ready():
            return
        rank = self.current
        rank.ready, rank.waits_for = ready, waits_for
        self._pass_on(rank)
        rank.ready = None
        if not ready():
            raise Stopped

    def yield_turn(self) -> None:
        """Let another rank run, if any can: this one is polling, and may ask again."""
        self.check()
        self._pass_on(self.current)

    def fail(self, error: BaseException, rank: int | None) -> None:
        """Record an error; the other ranks stop at their next communication."""
        self.errors.setdefault(rank, error)

    def _run(self, rank: Rank, work: Callable[[int], None]) -> None:
        self._take(rank)
        self._here.rank = rank
        ended = "has returned"
        try:
            work(rank.number)
        except Stopped:
            ended = "was stopped"
        except BaseException as error:
            ended = f"has raised {type(error).__name__}"
            if error not in self.errors.values():
                self.fail(error, rank.number)
        rank.ended = ended
        next_rank = self._next_rank(rank)
        if next_rank is None:
            self._all_ended.set()
        else:
            next_rank.turn.release()

    def _pass_on(self, rank: Rank) -> None:
        next_rank = self._next_rank(rank)
        if next_rank is None or next_rank is rank:
            return
        rank.state = ProcessState()
        next_rank.turn.release()
        self._take(rank)

    def _take(self, rank: Rank) -> None:
        rank.turn.acquire()
        self._running = rank
        rank.state.restore()

    def _next_rank(self, rank: Rank) -> Rank | None:
        """Return the next rank that can continue, or, if none can, the next to be stopped. None if all have ended."""
        order = [*self.ranks[rank.number + 1 :], *self.ranks[: rank.number + 1]]
        left = [other for other in order if other.ended is None]
        found = next((other for other in left if self._over or other.ready is None or other.ready()), None)
        if found is None and left:
            if not self.errors:
                self.fail(self._deadlock(), None)
            self._over = True
            found = left[0]
        return found

    def _interrupt(self) -> None:
        """Stop the running rank wherever it is, and thereby the others."""
        self._over = True
        thread = self._running.thread if self._running is not None else None
        if thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))
        self._all_ended.wait(10.0)
