"""Calls that are left to torch: the same answers, by its own rule, and only as long as nobody asks for another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from convmesh import batching, kernels
from convmesh.batching import choice, cost, shortcut
from tests.batching.oracle import assert_same, loop_and_stack

# torch's own, at the first jvp of a process
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

X, W, Y = (torch.randn(*shape).double() for shape in ((3, 2, 4, 6, 6), (3, 5, 4, 3, 3), (3, 2, 5, 4, 4)))


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.conv2d(x, w) * y).sum()


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor anything compiled: with that, less is left to torch."""
    monkeypatch.setattr(kernels, "available", lambda: False)
    choice.forget()
    yield
    choice.forget()


@pytest.fixture
def _no_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them everything is left to torch."""
    monkeypatch.setattr(cost, "price_table", lru_cache(lambda: cost.PriceTable("an empty table", {})))


def left_to_torch() -> int:
    return len(shortcut._left_to_torch)


@pytest.mark.usefixtures("_no_prices")
def test_a_call_like_the_one_before_goes_straight_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = vmap(grad(loss, (0, 1)))
    first = mapped(W, X, Y)
    assert left_to_torch() == 2
    monkeypatch.setattr("convmesh.batching.rules.choose", lambda *_: pytest.fail("chose once more"))
    assert_same(mapped(W, X, Y), first)
    assert_same(first, loop_and_stack(grad(loss, (0, 1)), (0, 0, 0), W, X, Y))


@pytest.mark.usefixtures("_no_prices")
def test_what_lies_otherwise_is_another_call() -> None:
    forward = vmap(torch.conv2d)
    forward(X, W)
    forward(X.transpose(0, 1).contiguous().transpose(0, 1), W)
    vmap(torch.conv2d, (1, 0))(X.movedim(0, 1), W)
    forward(X.float(), W.float())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        forward(X, W)
    finally:
        torch.set_num_threads(threads)
    assert left_to_torch() == 5


@pytest.mark.usefixtures("_no_prices")
def test_those_who_force_or_ask_are_heard() -> None:
    forward = vmap(torch.conv2d)
    forward(X, W)
    assert [each.algorithm.name for each in batching.explain(forward, X, W)] == ["fold-groups"]
    with batching.force("loop"):
        assert [each.algorithm.name for each in batching.explain(forward, X, W)] == ["loop"]


def test_derivatives_are_not_passed_over() -> None:
    forward = vmap(torch.conv2d)
    known = forward(X, W)
    value, tangent = jvp(lambda x: forward(x, W), (X,), (X,))
    assert_same((value, tangent), (known, known))
    tracked = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(forward(tracked, W).sum(), tracked)
    assert_same(gradient, loop_and_stack(grad(lambda x, w: torch.conv2d(x, w).sum()), (0, 0), X, W))


@pytest.mark.usefixtures("_no_prices")
def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortcut, "LONGEST", 2)
    for size in range(5, 9):
        vmap(torch.conv2d)(torch.randn(3, 2, 4, size, size).double(), W)
        assert 0 < left_to_torch() <= 2
