"""Bad values in an index: an IndexError on every rank, whichever of them has the value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from ... import _torch
from ...comm import CommunicationError, all_reduce
from ...kernels import synchronous
from ...sharding.layout import Layout

aten = torch.ops.aten

Result = TypeVar("Result")


def out_of_range(index: torch.Tensor, size: int) -> torch.Tensor:
    return ((index < 0) | (index >= size)).any()


def may_route(*_: Any) -> bool:
    """Whether indices may be sent to who owns what they point to: how many go where no compiler knows."""
    return not _torch.tracing()


def check_within(index: torch.Tensor, size: int) -> None:
    """For an index of which every rank has all, also where a rank then has nothing to read or write."""
    if synchronous(index):
        if out_of_range(index, size):
            raise _bad(size)
    else:
        aten._assert_async.msg(~out_of_range(index, size), "index out of range")


def raised_alike(
    compute: Callable[[], Result],
    places: torch.Tensor,
    size: int,
    index: Layout | None = None,
    settled: Sequence[int] = (),
) -> Result:
    """What `compute` makes of `places`, this rank's local tensor of an index into `size` numbers.

    Where the `index` is sharded, ranks tell each other with one number whether theirs was bad. Only CPUs know that at
    once, and an index that is used in backward was used before. Along the mesh dimensions `settled` all know already.
    """
    if not synchronous(places) or _torch.in_backward():
        return compute()
    result: list[Result] = []
    try:
        result.append(compute())
    except IndexError:  # also where others have sent this rank a bad value
        pass
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not out_of_range(places, size):
            raise
    bad = torch.tensor(0.0 if result else 1.0)
    if index is not None:
        mesh_dims = [m for m in index.sharded_over() if m not in settled]
        bad = all_reduce(bad, index.mesh, mesh_dims, "max")
    if bad:
        raise _bad(size)
    return result[0]


def _bad(size: int) -> IndexError:
    return IndexError(f"index out of range: it has values that are not between 0 and {size - 1}")
