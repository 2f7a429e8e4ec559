"""The save that is being written in the background, if any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from ... import _torch

log = logging.getLogger("convmesh.checkpoint")


class PendingCheckpoint:
    """A checkpoint that is written in the background: the result of `save_checkpoint(..., wait=False)`.

    The process waits for it before it exits. If the save fails, the error is also logged.

    Examples:
        >>> model = convmesh.distribute(nn.Conv2d(1, 1, 3), mesh)
        >>> saving = convmesh.save_checkpoint("runs/c", model, step=1, wait=False)
        >>> saving.wait().name
        'step-000000001'
        >>> saving.done()
        True
    """

    def __init__(self, write: Callable[[], Path]):
        self._write = write
        self._path: Path | None = None
        self._error: Exception | None = None
        # Not a daemon: the process waits for it at exit.
        self._thread = threading.Thread(target=self._run, name="convmesh-checkpoint", daemon=False)
        if _torch.ranks_are_threads():  # they take turns: a thread would wait for ranks that cannot begin
            self._run()
        else:
            self._thread.start()

    def wait(self) -> Path:
        """Wait until the checkpoint is on disk.

        Returns:
            Its path.

        Raises:
            CheckpointError: It could not be written.
        """
        self._finish()
        if self._error is not None:
            raise self._error
        assert self._path is not None, "written, or failed"
        return self._path

    def done(self) -> bool:
        """Whether the checkpoint is written or has failed, so that `wait` returns or raises at once."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._path = self._write()
        except Exception as error:
            # `wait` may never be called.
            log.error("%s", error)
            self._error = error
        finally:
            del self._write  # it holds the copies of everything

    def _finish(self) -> None:
        if not self.done():
            self._thread.join()


_last: PendingCheckpoint | None = None


def start(write: Callable[[], Path]) -> PendingCheckpoint:
    """Start to write in a thread, after the previous save has finished."""
    global _last
    finish()
    _last = PendingCheckpoint(write)
    return _last


def finish() -> None:
    """Wait for the last save, whether it succeeds or fails."""
    if _last is not None:
        _last._finish()
