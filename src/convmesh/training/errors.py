"""Errors other than `ShardingError`."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names it, the reason, and a remedy.

    All ranks raise it, whichever rank the cause is on. A load that raises has changed nothing.
    """
