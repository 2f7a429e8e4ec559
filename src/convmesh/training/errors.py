"""What can go wrong beside a sharding that cannot be had."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message says which, why, and what would help."""
