"""Calls like one before: found by one look-up, with the same answers, and only as long as nobody asks for another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from convmesh import batching, kernels
from convmesh.batching import choice, rules
from tests.batching.oracle import assert_same, loop_and_stack

# torch's own, at the first jvp of a process
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

X, W, Y = (torch.randn(*shape).double() for shape in ((3, 2, 4, 6, 6), (3, 5, 4, 3, 3), (3, 2, 5, 4, 4)))


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (torch.conv2d(x, w) * y).sum()


@pytest.fixture(params=[True, False], ids=["kernels", "torch"], autouse=True)
def _nothing_known(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With kernels of our own, and left to torch."""
    if not request.param:
        monkeypatch.setattr(kernels, "available", lambda: False)
    choice.forget()
    yield
    choice.forget()


def test_a_call_like_the_one_before_is_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = vmap(grad(loss, (0, 1)))
    first = mapped(W, X, Y)
    assert len(rules._known) == 2
    for name in ("choose", "forward_task", "backward_tasks", "nature_of"):
        monkeypatch.setattr(rules, name, lambda *_: pytest.fail("looked into once more"))
    assert_same(mapped(W, X, Y), first)
    assert_same(first, loop_and_stack(grad(loss, (0, 1)), (0, 0, 0), W, X, Y))


def test_the_same_call_gives_the_same_bits() -> None:
    mapped = vmap(grad(loss, (0, 1)))
    first = mapped(W, X, Y)
    for _ in range(3):
        assert all(torch.equal(*pair) for pair in zip(mapped(W, X, Y), first, strict=True))


def test_what_lies_otherwise_is_another_call() -> None:
    forward = vmap(torch.conv2d)
    want = forward(X, W)
    assert_same(forward(X.transpose(0, 1).contiguous().transpose(0, 1), W), want)
    assert_same(vmap(torch.conv2d, (1, 0))(X.movedim(0, 1), W), want)
    forward(X.float(), W.float())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        forward(X, W)
    finally:
        torch.set_num_threads(threads)
    assert len(rules._known) == 5


def test_those_who_force_or_ask_are_heard() -> None:
    forward = vmap(torch.conv2d)
    forward(X, W)
    usual = "direct" if kernels.available() else "fold-groups"
    assert [each.algorithm.name for each in batching.explain(forward, X, W)] == [usual]
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


def test_negated_views_are_not_taken_for_what_memory_holds() -> None:
    forward = vmap(torch.conv2d)
    known = forward(X, W)
    negated = torch.complex(torch.zeros_like(X), -X).conj().imag
    assert negated.is_neg()
    assert_same(forward(negated, W), known)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LONGEST", 2)
    for size in range(5, 9):
        vmap(torch.conv2d)(torch.randn(3, 2, 4, size, size).double(), W)
        assert 0 < len(rules._known) <= 2
