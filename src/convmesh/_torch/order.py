"""Communications in a graph that is traced: in the same order and in the same pass on every rank.

The ranks' graphs differ. A compiler goes by what depends on each other in one of them, and moves, drops and repeats the
rest, also where another rank waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from .graph import in_backward_pass
from .tracing import tie, tie_in_place

# The tracer of the graph, and the result of the last communication in it: the token that orders them.
_last: tuple[Any, torch.Tensor] | None = None
_exchanges = 0  # of all graphs


def in_order(
    tensor: torch.Tensor, communicate: Callable[[torch.Tensor], torch.Tensor], exchange: bool = False
) -> torch.Tensor:
    """What `communicate` makes of a tensor while a graph is traced, after what was communicated in it before.

    An `exchange` may bring some ranks nothing that they use.
    """
    global _last, _exchanges
    _exchanges += exchange
    tracer = _tracer()
    if _last is not None and tracer is _last[0]:
        tensor = after_the_last(tensor)
    with _in_its_pass():
        result = communicate(tensor)
    _last = None if tracer is None else (tracer, result)
    return result


def _tracer() -> Any:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return None if mode is None else mode.tracer


def last_communication() -> object:
    """Of all graphs; the same object until there is another one."""
    return _last


def exchanges() -> int:
    """How many were traced so far."""
    return _exchanges


def after_the_last(tensor: torch.Tensor) -> torch.Tensor:
    """Made to depend on the last communication, while a graph is traced."""
    return tie(tensor, after=() if _last is None else _last[1:])


def keep_after_the_last(tensor: torch.Tensor, *operands: torch.Tensor) -> None:
    """The same for a tensor that keeps its memory; on operands, too."""
    tie_in_place(tensor, *operands, after=() if _last is None else _last[1:])


@contextmanager
def _in_its_pass() -> Iterator[None]:
    """Keep a communication in the pass that it is traced in, forward or backward.

    The compiler goes by what depends on a gradient, and the zeros that a rank without a part contributes depend on
    none: it would send them in the forward pass, and the other ranks theirs in the backward pass. Or it would receive
    nothing once more in the backward pass, because that takes no time.
    """
    meta = traceback.current_meta
    backward = in_backward_pass()
    name, mark = ("partitioner_tag", "must_be_in_backward") if backward else ("recompute", CheckpointPolicy.MUST_SAVE)
    before = meta.get(name)
    if before is None or backward:  # else the user says what is computed again
        meta[name] = mark
    try:
        yield
    finally:
        if before is None:
            del meta[name]
        else:
            meta[name] = before
