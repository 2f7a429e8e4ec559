"""Which of torch's kernels resamples on a device: they differ in rounding, and in which sizes they treat as equal."""

from __future__ import annotations

from collections.abc import Sequence


def nearest_is_general(device: str, targets: Sequence[int], channels_last: bool) -> bool:
    """Whether the kernel for any number of dimensions finds nearest neighbours: CPUs have it, and only forward."""
    if device != "cpu" or channels_last:
        return False
    return len(targets) != 2 or sum(targets) > 128


def nearest_rounds_scales(device: str, general: bool) -> bool:
    """Whether it takes each place times the scale, also where sizes are equal, or one is twice the other."""
    return general or device != "cpu"


def cubic_copies_equal_sizes(device: str, backward: bool) -> bool:
    """Whether it copies where sizes are equal, whatever the scale."""
    return backward or device != "cpu"
