"""Runs any rank of any mesh in this process, without values and without other ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import _torch, api, batching
from ..sharding import installation
from ..training.borrowed import giving_back
from .autocast import Autocast
from .layers import Layers
from .problem import Mesh, PlanError, Problem, ranks_of
from .recorder import Recorder, recorded
from .trace import Kind, Trace

Result = TypeVar("Result")
STEPS = 2  # of which the last one is looked at: the first one makes the optimizer's state


@contextmanager
def silent_world() -> Iterator[None]:
    """Context manager within which `dry_run` works. It leaves process groups and convmesh's rules as they were."""
    if _torch.ranks_are_threads():
        raise PlanError("a plan is made outside of convmesh.simulate: call it before, or afterwards")
    on = installation.installed(), batching.installed()
    try:
        ranks = _torch.threads_as_ranks(_torch.silent_group)
        with ranks, _torch.steps_without_values(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        if (installation.installed(), batching.installed()) != on:
            api.disable()


def dry_run(problem: Problem, mesh: Mesh, rank: int, limit: int | None = None, steps: int = STEPS) -> Trace:
    """Run a rank's training step and record it. The run ends where it needs more bytes of memory than `limit`."""
    return in_thread(lambda: _run(problem, mesh, rank, limit, steps))


def _run(problem: Problem, mesh: Mesh, rank: int, limit: int | None, steps: int) -> Trace:
    world = _torch.rank_of_threads(rank, ranks_of(mesh), _torch.SilentStore())
    with world, torch.device(_torch.DEVICE), Autocast(), giving_back():
        on = init_device_mesh(_torch.DEVICE, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        return traced(problem, on, limit, steps)


def traced(problem: Problem, mesh: DeviceMesh, limit: int | None = None, steps: int = STEPS) -> Trace:
    """Record the training step of this rank of any mesh, with values or without."""
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    trace = Trace(tuple(mesh.get_coordinate() or ()), sizes)

    def run(recorder: Recorder) -> None:
        step = problem.step(mesh)
        inputs = problem.tensors(mesh)
        for tensor in inputs.values():
            recorder.mark(tensor, Kind.INPUTS)
        for number in range(steps):
            if number == steps - 1:
                recorder.mark_state()
                trace.begins = len(trace.events)
                trace.needs.clear()
                trace.refusals.clear()
            step(**inputs)
        recorder.mark_state()

    return recorded(trace, Layers(), run, limit)


class _InterruptedError(Exception):
    """In the thread of a run that nobody waits for any more."""


def in_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a thread, which has none of the caller's modes and process groups of its own. It has ended when
    this returns, also where somebody interrupts it."""
    results: list[Result] = []
    errors: list[BaseException] = []
    # Python 3.11 takes a thread for ended when somebody interrupts who joins it, and leaves one alone whose start is
    # interrupted: it begins when that is over, and says itself when it is done.
    begins, done, given_up = Event(), Event(), Event()

    def run() -> None:
        begins.wait()
        try:
            if not given_up.is_set():
                results.append(work())
        except BaseException as error:  # raised again where the work was asked for
            errors.append(error)
        finally:
            done.set()

    thread = Thread(target=run, name="convmesh plan")
    try:
        thread.start()
        begins.set()
        while not done.wait(0.1):  # an interrupt that comes right before a wait is seen after it
            pass
    except BaseException:
        if begins.is_set():
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_InterruptedError))
            done.wait()
        given_up.set()
        begins.set()
        raise
    finally:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
    return results[0]
