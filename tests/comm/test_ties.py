"""What a compiler's graph shows already is tied to nothing once more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from convmesh import _torch

Tensor = torch.Tensor


def written_over(x: Tensor, y: Tensor) -> Tensor:
    result = x * 2
    result.copy_(y)
    return _torch.tie(result, x)


# Of x and y, and how many operators more there are.
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "made of it": (lambda x, y: _torch.tie((x * 2).sum(0) + y, x, y), 0),
    "made of one of two": (lambda x, y: _torch.tie(x * 2, x, y), 1),
    "made of nothing": (lambda x, y: _torch.tie(torch.zeros(3, dtype=x.dtype), x, y), 1),
    "only of its shape": (lambda x, y: _torch.tie(torch.zeros_like(x), x), 1),
    "a view of it": (lambda x, y: _torch.tie(x[:1], x), 1),
    "written over": (written_over, 1),
    "booleans": (lambda x, y: _torch.tie(torch.zeros(3, dtype=torch.bool), x), 1),
    "itself": (lambda x, y: _torch.tie(x, x), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_not_seen_is_tied(name: str) -> None:
    function, count = CASES[name]
    x, y = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    graph = make_fx(lambda x, y: function(x.clone(), y.expand(2, 3).clone()))(x, y)
    ties = [node for node in graph.graph.nodes if node.target is torch.ops.convmesh.nothing.default]
    assert len(ties) == count
    expected = function(x.clone(), y.expand(2, 3).clone())
    assert torch.equal(graph(x, y), expected)
    assert graph(x, y).dtype == expected.dtype
