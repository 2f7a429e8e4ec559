"""Bad values in an index: every rank raises the IndexError, whichever of them holds the value."""

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
    """Return a bool tensor: whether any index is outside of `[0, size)`."""
    return ((index < 0) | (index >= size)).any()


def can_route(*_: Any) -> bool:
    """Whether indices may be sent to the ranks that own what they point to.

    Not while tracing: a compiler does not know how many go where.
    """
    return not _torch.tracing()


def check_bounds(index: torch.Tensor, size: int) -> None:
    """Check an index of which every rank has all values, also on ranks that then have nothing to read or write."""
    if synchronous(index):
        if out_of_range(index, size):
            raise _index_error(size)
    else:
        aten._assert_async.msg(~out_of_range(index, size), "index out of range")


def raise_on_all_ranks(
    compute: Callable[[], Result],
    places: torch.Tensor,
    size: int,
    index: Layout | None = None,
    already_agreed: Sequence[int] = (),
) -> Result:
    """Return `compute()`; raise an IndexError on every rank if any rank's `places` have a bad value.

    `places` is this rank's local tensor of an index into a dimension of `size`. Where the `index` is sharded, ranks
    all-reduce one value: whether theirs was bad. Over the mesh dimensions `already_agreed` all of them know that
    without it. Only CPU values are known at once, and an index that is used in backward was checked in forward:
    elsewhere nothing is checked here.
    """
    if not synchronous(places) or _torch.in_backward():
        return compute()
    result: list[Result] = []
    try:
        result.append(compute())
    except IndexError:  # also where another rank has sent this one a bad value
        pass
    except RuntimeError as error:
        if isinstance(error, CommunicationError) or not out_of_range(places, size):
            raise
    bad = torch.tensor(0.0 if result else 1.0)
    if index is not None:
        mesh_dims = [m for m in index.sharded_over() if m not in already_agreed]
        bad = all_reduce(bad, index.mesh, mesh_dims, "max")
    if bad:
        raise _index_error(size)
    return result[0]


def _index_error(size: int) -> IndexError:
    return IndexError(f"index out of range: it has values that are not between 0 and {size - 1}")
