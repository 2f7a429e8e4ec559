"""`enable` and `disable`."""

from __future__ import annotations

from dataclasses import replace
from threading import Lock
from types import TracebackType

from torch.distributed.device_mesh import DeviceMesh

from . import _torch, batching
from . import ops as ops  # declares the rules
from .sharding import dtensor_attributes as dtensor_attributes  # declares what Python sees of a DTensor
from .sharding import installation
from .sharding.debug import agreement

_one_at_a_time = Lock()  # threads may be ranks
_told = False  # whether the program itself has called `enable` or `disable`


class Enabled:
    """The result of `enable()`. As a context manager it restores the previous state at the end of the block."""

    def __init__(self) -> None:
        self._before = installation.installed()
        self._checked_before = agreement.checking()
        self._settings_before = batching.settings()
        self._agreed_before = batching.agreed_machine()

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._checked_before:
            agreement.end()
        batching.set_settings(self._settings_before)
        batching.agree(self._agreed_before)
        if not self._before:
            switch_off()


def enable(
    *,
    check: bool = False,
    timeout: float | None = None,
    benchmark: bool = False,
    exact: bool = False,
    mesh: DeviceMesh | None = None,
) -> Enabled:
    """Switch on convmesh's rules for sharded DTensors and for `torch.func.vmap` over convolutions.

    Convolutions, pooling, norms and the other [operators](operators.md) then give the results of one device on any
    sharded DTensor. `distribute` calls this function, and so do `shard`, `from_region` and `loader`, unless the program
    has called `enable` or `disable` before. Call it yourself if you use other DTensors without `distribute`.

    The rules stay on until `disable()`, or until the end of the `with` block.

    Args:
        check: Compare, before each communication, what the ranks are about to do. If they differ, all of them raise a
            `MismatchError`. This is for debugging: every communication then waits for a few messages through the store.
            All ranks must switch it on at the same point of the program.
        timeout: With `check`, the number of seconds after which a rank that does not take part is reported. The default
            is the timeout of the process group.
        benchmark: Time every algorithm at the first vmapped convolution of each shape, and use the fastest one from
            then on, as `torch.backends.cudnn.benchmark` does. Measurements are kept on disk, by processor, number of
            threads and version. Without it, a fixed list of cases decides on CPUs, and torch's own rules compute
            vmapped convolutions on other devices. For DTensors the first rank measures and all ranks follow. For plain
            tensors in a job of several processes nothing is measured.
        exact: Rule out algorithms for vmapped convolutions that round more than direct convolution does: Winograd's,
            which float32 may use on CPUs otherwise. `torch.use_deterministic_algorithms(True)` does so, too. float64
            never uses them.
        mesh: Let the ranks of this mesh agree now on how they compute vmapped convolutions of *plain* tensors, so that
            they may use compiled kernels. All ranks of the mesh must make this call. Without it, the processes of a
            job use only what every machine has, so that all of them get the same bits.

    Returns:
        A context manager. Ignore it to leave the rules on.

    Raises:
        RuntimeError: The installed torch is not supported (2.13 to 2.15 are).
        MismatchError: With `check`, later on, from the operator that found the difference.

    Examples:
        >>> x = convmesh.shard(torch.ones(2, 1, 8, 8), mesh, data=0, h=2)
        >>> w = convmesh.shard(torch.ones(1, 1, 3, 3), mesh)
        >>> with convmesh.enable():
        ...     y = F.conv2d(x, w, padding=1)
        >>> y.full_tensor()[0, 0, 3].tolist()  # row 3 reads row 4, which another rank owns
        [6.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0, 6.0]
    """
    global _told
    _told = True
    with _one_at_a_time:
        state = Enabled()
        installation.install()
        batching.install()
    if check:
        agreement.begin(timeout)
    if benchmark or exact:
        before = batching.settings()
        batching.set_settings(replace(before, benchmark=before.benchmark or benchmark, exact=before.exact or exact))
    if mesh is not None:
        batching.agree(batching.machine_of(mesh))
    return state


def disable() -> None:
    """Switch all rules off and restore what torch had before `enable()`.

    This also ends `check`, `benchmark` and `exact`, and is safe to call twice. On a simulated rank the rules stay on
    until the simulation ends.

    Examples:
        >>> convmesh.disable()
    """
    global _told
    _told = True
    switch_off()


def enable_unless_told() -> None:
    """Enable the rules for a new sharded tensor unless the program has decided: torch alone is silently wrong."""
    if not _told and not (installation.installed() and batching.installed()):
        with _one_at_a_time:
            installation.install()
            batching.install()


def switch_off() -> None:
    agreement.end()
    batching.set_settings(batching.Settings())
    batching.agree(None)
    if not _torch.ranks_are_threads():  # other ranks may be in the middle of a rule
        batching.uninstall()
        installation.uninstall()
