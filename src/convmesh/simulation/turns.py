"""Ranks that take turns: one runs until it waits for another, and so nothing changes under its hands.

That is why it is known at once when ranks wait for each other, and why every run is the same as the last.
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
    """Ends a rank that has done nothing wrong: another one has failed, and would keep it waiting."""


@dataclass(eq=False)
class Rank:
    """A thread, and whether it can go on."""

    number: int
    state: ProcessState
    turn: threading.Lock = field(default_factory=threading.Lock)
    thread: threading.Thread | None = None
    ready: Callable[[], bool] | None = None  # None: it can go on
    waits_for: Callable[[], str] = lambda: ""
    ended: str | None = None
    works: WeakSet[Any] = field(default_factory=WeakSet)  # communications that it has begun, in whatever state


class Turns:
    """Whose turn it is, of ranks that are threads."""

    def __init__(self, size: int, stuck: Callable[[], Exception]):
        """`stuck` is asked for the error when all ranks wait."""
        before = ProcessState()
        self.ranks = [Rank(number, before.fresh()) for number in range(size)]
        for rank in self.ranks:
            rank.turn.acquire()
        self.errors: dict[int | None, BaseException] = {}  # None: of no single rank
        self._stuck = stuck
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
            while not self._all_ended.wait(0.2):  # a wait without an end could not be interrupted everywhere
                pass
        except BaseException:  # of the person at the keyboard
            self._interrupt()
            raise
        finally:
            for rank in self.ranks:
                if rank.thread is not None:
                    rank.thread.join(None if self._all_ended.is_set() else 1.0)
            before.put_back()

    @property
    def current(self) -> Rank:
        """The rank that calls this."""
        found: Rank | None = getattr(self._here, "rank", None)
        if found is None:
            raise RuntimeError("a simulated rank communicates from the thread that its function was called in only")
        return found

    def check(self) -> None:
        """End this rank if another has failed."""
        if self.errors or self._over:
            raise Stopped

    def wait(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let others go on until `ready()`; `waits_for` says what this is, for the error if it never comes."""
        if ready():
            return
        rank = self.current
        rank.ready, rank.waits_for = ready, waits_for
        self._pass_on(rank)
        rank.ready = None
        if not ready():
            raise Stopped

    def offer(self) -> None:
        """Let others go on, if any can: this rank only asks whether something is there, and may ask again."""
        self.check()
        self._pass_on(self.current)

    def fail(self, error: BaseException, rank: int | None) -> None:
        """Others go on to their next communication, where they end."""
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
        following = self._following(rank)
        if following is None:
            self._all_ended.set()
        else:
            following.turn.release()

    def _pass_on(self, rank: Rank) -> None:
        following = self._following(rank)
        if following is None or following is rank:
            return
        rank.state = ProcessState()
        following.turn.release()
        self._take(rank)

    def _take(self, rank: Rank) -> None:
        rank.turn.acquire()
        self._running = rank
        rank.state.put_back()

    def _following(self, rank: Rank) -> Rank | None:
        """The next one that can go on; when none can, the next that is to end. None when all have ended."""
        order = [*self.ranks[rank.number + 1 :], *self.ranks[: rank.number + 1]]
        left = [other for other in order if other.ended is None]
        found = next((other for other in left if self._over or other.ready is None or other.ready()), None)
        if found is None and left:
            if not self.errors:
                self.fail(self._stuck(), None)
            self._over = True
            found = left[0]
        return found

    def _interrupt(self) -> None:
        """End the rank that runs wherever it is, and so the others."""
        self._over = True
        thread = self._running.thread if self._running is not None else None
        if thread is not None and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped))
        self._all_ended.wait(10.0)
