"""The public switch."""

from __future__ import annotations

from threading import Lock
from types import TracebackType

from torch.distributed.device_mesh import DeviceMesh

from . import batching
from . import ops as ops  # declares the rules
from .sharding import dtensor_attributes as dtensor_attributes  # declares what Python sees of a DTensor
from .sharding import registry
from .sharding.debug import agreement

_one_at_a_time = Lock()  # threads may be ranks


class Enabled:
    """What `enable()` returns. As a context manager it puts back, at its end, the state that it found."""

    def __init__(self) -> None:
        self._before = registry.installed()
        self._checked_before = agreement.checking()
        self._tried_before = batching.tries_all()
        self._agreed_before = batching.agreed_machine()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._checked_before:
            agreement.end()
        batching.try_all(self._tried_before)
        batching.agree(self._agreed_before)
        if not self._before:
            disable()


def enable(
    *, check: bool = False, timeout: float | None = None, benchmark: bool = False, mesh: DeviceMesh | None = None
) -> Enabled:
    """Make the operators of convolutional networks exact on sharded DTensors, and `torch.func.vmap` over convolutions
    fast; from now on, or for a `with` block.

    With `check`, ranks compare what they are about to do before each communication, and a `MismatchError` on all of
    them says where they differ, or which rank did not come within `timeout` seconds (by default, the time-out of the
    process group). It is for finding errors: every communication waits for a few messages through the store. All
    ranks have to switch it on at the same point.

    With `benchmark` the first vmapped convolution of every shape tries all algorithms by the clock, in place of
    estimating what they cost: slower once, and right for the machine at hand. Of DTensors the first rank tries, and
    all do the same; of plain tensors in a job of several processes, nobody does.

    With `mesh`, its ranks agree, now, on how they compute vmapped convolutions of plain tensors: by kernels of our own
    if all have them, and by the first rank's calibration. All of them make this call. Without it, processes of a job
    compute plain tensors in ways that every machine has: they get the same bits, and ask nobody.

    Once on, each stays on until `disable()` or the end of the `with` block.
    """
    with _one_at_a_time:
        state = Enabled()
        registry.install()
        batching.install()
    if check:
        agreement.begin(timeout)
    if benchmark:
        batching.try_all(True)
    if mesh is not None:
        batching.agree(batching.machine_of(mesh))
    return state


def disable() -> None:
    """Put back exactly what was there before `enable()`."""
    agreement.end()
    batching.uninstall()
    batching.try_all(False)
    batching.agree(None)
    registry.uninstall()
