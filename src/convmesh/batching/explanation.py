"""Which algorithms a function's vmapped convolutions were computed with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import choice
from .choice import Decision


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Decision]:
    """Run a function and report how its vmapped convolutions were computed, and why.

    Args:
        function: The function to run.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        One decision for each vmapped convolution. `str(decision)` is a line of text: the product, its sizes, the
        algorithm, and the reason.

    Raises:
        Exception: Whatever `function` raises.

    Examples:
        >>> images, kernels = torch.randn(8, 4, 3, 16, 16), torch.randn(8, 6, 3, 3, 3)  # 8 networks, 8 inputs
        >>> with convmesh.enable():
        ...     decisions = convmesh.explain(torch.func.vmap(F.conv2d), images, kernels)
        >>> str(decisions[0]).partition(",")[0]
        'response of [B...] x [B...]'
    """
    decisions: list[Decision] = []
    choice.listeners.append(decisions)
    try:
        function(*args, **kwargs)
    finally:
        # By identity: two equal lists of decisions may listen at once.
        choice.listeners[:] = [listener for listener in choice.listeners if listener is not decisions]
    return decisions
