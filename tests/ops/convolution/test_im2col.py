"""`F.unfold` and `F.fold` on sharded images, against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.harness import Pool
from tests.ops.against_dense import Sharded, check_elements


def unfold(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
    return F.unfold(x, *numbers)


def fold(x: torch.Tensor, *numbers: Any) -> torch.Tensor:
    return F.fold(x, *numbers)


def columns(at: tuple[Any, ...], back: tuple[Any, ...]) -> list[Sharded]:
    """(kernel, dilation, padding, stride) of windows on 7 x 6, and back."""
    numbers = [((3, 2), 1, 1, 1), (2, 1, 0, 2), ((2, 3), (2, 1), (0, 2), (3, 1)), (1, 1, 0, 3)]
    made = []
    for kernel, dilation, padding, stride in numbers:
        whole = F.unfold(torch.zeros(2, 4, 7, 6), kernel, dilation, padding, stride)
        made.append(Sharded(unfold, (((2, 4, 7, 6), at),), (kernel, dilation, padding, stride)))
        made.append(Sharded(fold, ((tuple(whole.shape), back),), ((7, 6), kernel, dilation, padding, stride)))
    return [*made, Sharded(unfold, (((4, 7, 6), tuple(p - 1 if isinstance(p, int) and p else p for p in at)),), (2,))]


def test_windows_as_columns(pool: Pool) -> None:
    pool.run_cases(check_elements, columns((2,), (2,)) + columns((3,), (1,)) + columns((1,), (0,)), mesh=(2,))
    pool.run_cases(check_elements, columns((2,), (2,)), mesh=(4,))
    pool.run_cases(
        check_elements, columns((0, 2), (0, 2)) + columns((2, 2), (2, 2)) + columns(("P", 2), (2, "P")), mesh=(2, 2)
    )
