"""A pool of real gloo processes to which a test sends a function and from which it gets every rank's result.

Starting processes that import torch takes seconds, so one pool serves the whole pytest run. What a test may do to it
(raise, hang, die) must not reach the next test: whenever the ranks may no longer agree on what they have said to each
other, the processes are killed, and the next call starts new ones.
"""

import atexit
import math
import multiprocessing as mp
import os
import pickle
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.distributed.device_mesh import DeviceMesh

from tests.worker import WORLD_SIZE, MeshKey, Reply, pack, serve, unpack

CALL_SECONDS = 120.0
# On a machine that computes much else, ranks are slow, and none hangs: TEST_PATIENCE=5 waits five times as long.
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
# SWEEP=all runs every case of a sweep that `make test` takes a share of.
SWEEPS_ALL = os.environ.get("SWEEP") == "all"
START_SECONDS = 300.0  # on a machine where everything else is being tested, too
# How long the other ranks may go on once a rank has raised: they may just be slower, or wait for it for ever.
GRACE_SECONDS = 5.0


class RankError(RuntimeError):
    """A rank raised. `rank` is the first that did, `traceback` its own text; the message has every distinct one."""

    def __init__(self, rank: int, traceback: str, message: str | None = None) -> None:
        super().__init__(message or f"rank {rank} raised:\n{traceback}")
        self.rank = rank
        self.traceback = traceback


class RankHung(RankError):  # noqa: N818 - says what happened to the rank
    """A rank did not return in time; `traceback` is where it was."""


class RankDied(RankError):  # noqa: N818 - says what happened to the rank
    """A rank's process ended during a call; it left no traceback, so `traceback` is its exit code."""


@dataclass(frozen=True)
class _Worker:
    process: BaseProcess
    pipe: Connection
    stack_file: Path


@dataclass(frozen=True)
class _EachCase:
    fn: Callable[..., Any]

    def __call__(self, mesh: DeviceMesh, cases: Sequence[Any]) -> list[Any]:
        results = []
        for index, case in enumerate(cases):
            try:
                results.append(self.fn(mesh, case))
            except BaseException as error:
                error.add_note(f"in case {index}: {case!r}")
                raise
        return results


def share_of(cases: Sequence[Any], share: float) -> Sequence[Any]:
    """Some of the cases of a sweep, drawn by a fixed seed; all of them with SWEEP=all."""
    if share == 1 or SWEEPS_ALL:
        return cases
    drawn = random.Random(0).sample(range(len(cases)), math.ceil(len(cases) * share))
    return [cases[number] for number in sorted(drawn)]


class Pool:
    """Gloo processes, started at the first call, and again at the first call after they had to be killed.

    With `stays_enabled` a call finds convmesh as the one before left it: benchmarks prepare in one, measure in others.
    """

    def __init__(self, stays_enabled: bool = False, world: int = WORLD_SIZE) -> None:
        self._stays_enabled, self._world = stays_enabled, world
        self._workers: list[_Worker] = []
        self._files: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        atexit.register(self.kill)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.kill()
        atexit.unregister(self.kill)

    @property
    def pids(self) -> list[int | None]:
        """The process of every rank; empty when none are running."""
        return [worker.process.pid for worker in self._workers]

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        mesh: Sequence[int] = (2, 2),
        names: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_SECONDS,
    ) -> list[Any]:
        """Run the module-level `fn(mesh, *args)` on the mesh's ranks; return the results in the mesh's flat order.

        The mesh takes the first ranks of the world unless `ranks` names others. Warnings raise in `fn`, and every rank
        starts from the same random seed. A rank that raises, hangs for `timeout` seconds or dies is a `RankError`.
        """
        size = math.prod(mesh)
        members = tuple(range(size)) if ranks is None else tuple(ranks)
        if len(members) != size or len(set(members)) != size or not set(members) <= set(range(self._world)):
            raise ValueError(f"mesh {tuple(mesh)} needs {size} distinct ranks below {self._world}, not {members}")
        key: MeshKey = (tuple(mesh), members, None if names is None else tuple(names))
        task = pickle.dumps((key, pack((fn, args))))
        if not all(worker.process.is_alive() for worker in self._workers):
            self.kill()
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                try:
                    worker.pipe.send_bytes(task)
                except OSError:
                    break  # it just died: waiting for its reply says so properly
            replies = self._replies(_name_of(fn), members, timeout * PATIENCE)
        except RankError:
            raise
        except BaseException:  # such as Ctrl-C: whatever the workers are doing, nobody waits for it any more
            self.kill()
            raise
        return [replies[rank].result for rank in members]

    def run_cases(
        self,
        fn: Callable[..., Any],
        cases: Sequence[Any],
        mesh: Sequence[int] = (2, 2),
        names: Sequence[str] | None = None,
        ranks: Sequence[int] | None = None,
        timeout: float = CALL_SECONDS,
        share: float = 1.0,
    ) -> list[list[Any]]:
        """Run `fn(mesh, case)` for every case in one round trip; for each case return what `run` would.

        The first case that fails ends the call, and the error tells which it was. `timeout` is for all cases together.
        With a `share`, only that share of the cases is run.
        """
        cases = share_of(cases, share)
        by_rank = self.run(_EachCase(fn), list(cases), mesh=mesh, names=names, ranks=ranks, timeout=timeout)
        return [list(results) for results in zip(*by_rank, strict=True)]

    def kill(self) -> None:
        """End all processes now; the next call starts new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers = []
        if self._files is not None:
            self._files.cleanup()
            self._files = None

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._files = tempfile.TemporaryDirectory(prefix="convmesh-pool-")
        folder = Path(self._files.name)
        for rank in range(self._world):
            pipe, far_end = context.Pipe()
            stack_file = folder / f"stack-{rank}"
            process = context.Process(
                target=serve,
                args=(rank, self._world, far_end, folder / "store", stack_file, self._stays_enabled),
                name=f"rank-{rank}",
                daemon=True,
            )
            process.start()
            far_end.close()  # else the pipe would outlive the process, and its death would not show
            self._workers.append(_Worker(process, pipe, stack_file))
        # No members: a start that fails in any way, even on all ranks alike, leaves nothing to go on with.
        self._replies("the start of the pool", (), START_SECONDS * PATIENCE)

    def _replies(self, name: str, members: Sequence[int], timeout: float) -> dict[int, Reply]:
        """Every rank's reply, if all are good; else leave the pool fit for the next call and raise what happened."""
        replies: dict[int, Reply] = {}
        failed: list[int] = []
        deadline = time.monotonic() + timeout
        while pending := {rank: worker for rank, worker in enumerate(self._workers) if rank not in replies}:
            watched = [source for worker in pending.values() for source in (worker.pipe, worker.process.sentinel)]
            ready = wait(watched, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank, worker in pending.items():
                if worker.pipe not in ready and worker.process.sentinel not in ready:
                    continue
                try:
                    if not worker.pipe.poll():  # dead, yet a child that it forked still holds the pipe open
                        raise EOFError
                    packed_reply = worker.pipe.recv_bytes()
                except (EOFError, OSError):
                    raise self._death(name, rank, replies) from None
                replies[rank] = unpack(packed_reply)
                if replies[rank].failure is not None:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS * PATIENCE)
        if failed:
            raise self._failure(name, members, replies, sorted(failed))
        if pending:
            stacks = self._stacks(pending)
            self.kill()
            headline = f"{name}: {_ranks(pending)} had not returned after {timeout:g} s"
            raise RankHung(min(pending), stacks[min(pending)], "\n".join([headline, *stacks.values()]))
        return replies

    def _death(self, name: str, rank: int, replies: dict[int, Reply]) -> RankDied:
        process = self._workers[rank].process
        process.join(GRACE_SECONDS)
        how = f"exit code {process.exitcode}"
        self.kill()
        # What the others raised comes second: most likely it is only that this rank was gone.
        parts = [f"{name}: rank {rank} died ({how})", *_failures(replies)]
        return RankDied(rank, how, "\n".join(parts))

    def _failure(self, name: str, members: Sequence[int], replies: dict[int, Reply], failed: list[int]) -> RankError:
        parts = _failures(replies)
        waiting = [rank for rank in range(self._world) if rank not in replies]
        if waiting:
            parts.append(f"{_ranks(waiting)} had not returned {GRACE_SECONDS:g} s later:")
            parts.extend(self._stacks(waiting).values())
        # Only if all members stopped at the same place have they taken part in the same collectives. Otherwise the
        # next test's first collective could meet one that this test left open, so it gets new processes.
        if waiting or set(failed) != set(members) or len({replies[rank].raised_at for rank in failed}) > 1:
            self.kill()
        first = replies[failed[0]].failure
        return RankError(failed[0], str(first), f"{name}: " + "\n".join(parts))

    def _stacks(self, ranks: Sequence[int] | dict[int, _Worker]) -> dict[int, str]:
        """Where the ranks are now, which faulthandler can tell even of a rank that is inside a collective.

        One that has not come so far as to open its file yet would end of the signal.
        """
        begun = [rank for rank in ranks if self._workers[rank].stack_file.exists()]
        for rank in begun:
            os.kill(self._workers[rank].process.pid or 0, signal.SIGUSR1)
        time.sleep(0.5 if begun else 0)
        here = {rank: f"was here:\n{self._workers[rank].stack_file.read_text()}" for rank in begun}
        return {
            rank: f"rank {rank} {here.get(rank, 'had not begun: its process was still importing')}" for rank in ranks
        }


def _name_of(fn: Callable[..., Any]) -> str:
    fn = fn.fn if isinstance(fn, _EachCase) else fn
    return f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)


def _failures(replies: dict[int, Reply]) -> list[str]:
    """Every distinct traceback, and the ranks that have it."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, reply in sorted(replies.items()):
        if reply.failure is not None:
            ranks_by_text.setdefault(reply.failure, []).append(rank)
    return [f"{_ranks(ranks)} raised:\n{text}" for text, ranks in ranks_by_text.items()]


def _ranks(ranks: Sequence[int] | dict[int, _Worker]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
