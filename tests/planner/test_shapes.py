"""Results that are remembered are those that torch works out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convmesh import _torch
from convmesh.planner.shapes import result

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.add.Tensor, (meta(2, 3), meta(3))),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int32), 2)),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int32), 2.0)),
    (aten.mul.Tensor, (meta(2, 3, dtype=torch.int32), True)),
    (aten.clone.default, (meta(4, 3).t(),)),
    (aten.cat.default, ([meta(2, 3), meta(2, 1)], 1)),
    (aten.var_mean.correction, (meta(2, 3), [1])),
    (aten.convolution.default, (meta(1, 2, 8, 8), meta(4, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    (aten.select.int, (meta(4, 3), 0, 1)),
    (aten.add_.Tensor, (meta(2, 3), 1)),
]


@pytest.mark.parametrize(("func", "args"), CALLS, ids=lambda value: str(value) if callable(value) else "")
def test_are_those_of_torch(func: Any, args: tuple[Any, ...]) -> None:
    def told(made: Any) -> list[tuple[Any, ...]]:
        tensors = made if isinstance(made, tuple) else (made,)
        return [(tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors]

    first, second = result(func, args, {}), result(func, args, {})
    assert told(first) == told(second) == told(func(*args))


def test_new_tensors_share_no_memory_and_views_do() -> None:
    x = meta(2, 3)
    sums = [result(aten.add.Tensor, (x, 1), {}) for _ in range(2)]
    views = [result(aten.select.int, (x, 0, 1), {}) for _ in range(2)]
    assert len({_torch.memory_of(tensor) for tensor in (x, *sums)}) == 3
    assert {_torch.memory_of(tensor) for tensor in views} == {_torch.memory_of(x)}
