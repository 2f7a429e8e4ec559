"""What can go wrong beside a sharding that cannot be had."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message says which one, why, and what to do.

    It is raised on every rank, whichever rank the cause is on. A load that raises has changed nothing.
    """
