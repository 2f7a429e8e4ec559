"""Max pooling by way of channels side by side, against torch's own on the same tensor."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch

from convmesh.kernels import pooling

aten = torch.ops.aten
PLANE, VOLUME = aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("operator", "shape", "window"),
    [
        (PLANE, (3, 9, 12, 11), ([3, 3], [2, 2], [1, 1])),
        (PLANE, (2, 8, 10, 7), ([2, 3], [2, 1], [1, 0], [3, 2], True)),
        (PLANE, (1, 16, 6, 6), ([2, 2], [2, 2], [0, 0], [1, 1], True)),
        (VOLUME, (2, 9, 6, 5, 7), ([3, 2, 3], [2, 2, 1], [1, 1, 0])),
    ],
)
def test_values_and_indices_are_those_of_torch(
    operator: Any, shape: tuple[int, ...], window: tuple[Any, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling, "ELEMENTS", 1)
    x = torch.randint(-2, 3, shape).to(dtype)  # with many equal ones, of which the first is taken
    x.view(-1)[::13], x.view(-1)[5::17], x.view(-1)[3::29] = nan, -inf, inf
    expected = operator(x, *window)
    turned = []
    turn = pooling._channels_last
    monkeypatch.setattr(pooling, "_channels_last", lambda sample: turned.append(sample) or turn(sample))
    for actual, wanted in zip(pooling.max_pool(x, operator, *window), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
        assert actual.is_contiguous()
    assert len(turned) == shape[0]


@pytest.mark.parametrize("shape", [(9, 12, 11), (0, 9, 12, 11), (2, 3, 12, 11)])
def test_what_turning_does_not_serve_goes_to_torch(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "ELEMENTS", 1)
    monkeypatch.setattr(pooling, "_channels_last", None)
    x = torch.randn(shape)
    for actual, wanted in zip(pooling.max_pool(x, PLANE, [2, 2]), PLANE(x, [2, 2]), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0)
