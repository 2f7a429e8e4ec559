"""Partial tensors are reduced once, and who else looks at their memory sees what it would see in torch's DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

SHAPE = (3, 4)
# Where a parameter lies, and its gradient.
PLACES: dict[tuple[int, ...], list[tuple[Any, Any]]] = {
    (2,): [(("R",), ("P",)), ((0,), ("P",)), ((1,), ("R",))],
    (3,): [(("R",), ("P",))],
    (2, 2): [(("R", "R"), ("P", "P")), ((0, 1), ("P", 1)), ((1, 1), ("P", "P")), (("R", 0), ("P", "P"))],
}


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def clip(w: nn.Parameter) -> None:
    nn.utils.clip_grad_norm_([w], 0.5)


def scale_another_wrapper(w: nn.Parameter) -> None:
    gradients = [w.grad.detach()]
    (norm,) = torch._foreach_norm(gradients)
    torch._foreach_mul_(gradients, 1 / (1 + float(norm)))


def scale_a_view(w: nn.Parameter) -> None:
    seen = w.grad.view(-1)
    clip(w)
    seen.mul_(3)


def add_later(w: nn.Parameter) -> None:
    clip(w)
    w.grad.add_(w.detach(), alpha=0.1).abs_()
    clip(w)


def fill(w: nn.Parameter) -> None:
    clip(w)
    w.grad.zero_()
    w.grad.add_(2)


def replace(w: nn.Parameter) -> None:
    clip(w)
    w.grad.data = w.grad.data * 2
    w.grad.copy_(w.grad + 1)


CHANGES: list[Callable[[nn.Parameter], None]] = [clip, scale_another_wrapper, scale_a_view, add_later, fill, replace]


def train(change: Callable[[nn.Parameter], None], placed: Callable[[torch.Tensor, bool], torch.Tensor]) -> nn.Parameter:
    """Two steps of which the second finds the gradient of the first, and more is added to that."""
    w = nn.Parameter(placed(numbers(0), False))
    steps = torch.optim.SGD([w], 0.1, momentum=0.9, weight_decay=0.01)
    w.grad = placed(numbers(1), True)
    for step in range(2):
        change(w)
        before = w.grad
        steps.step()
        assert w.grad is before, "an optimizer leaves a gradient where it is"
        w.grad += placed(numbers(2 + step), True)
    return w


def check_change(mesh: DeviceMesh, case: tuple[Callable[[nn.Parameter], None], Any, Any]) -> None:
    change, at, gradient_at = case
    expected = train(change, lambda tensor, _: tensor.clone())
    with convmesh.enable():
        actual = train(change, lambda t, gradient: place(t.clone(), mesh, gradient_at if gradient else at))
        assert isinstance(actual.grad, DTensor)
        assert actual.grad.placements == place(numbers(0), mesh, gradient_at).placements
        assert_close(actual.detach().full_tensor(), expected)
        assert_close(actual.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("mesh", PLACES)
def test_all_aliases_of_a_gradient_agree(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_change, [(change, *at) for change in CHANGES for at in PLACES[mesh]], mesh=mesh)


def look(mesh: DeviceMesh, case: tuple[Any, str]) -> list[float]:
    """Who holds a local tensor changes nothing, and sees its term of the sum, also after that was changed."""
    change, who = case
    looks = {"nobody": False, "one": dist.get_rank() == 0, "all": True}[who]
    with convmesh.enable(), CommDebugMode() as sent:
        w = nn.Parameter(place(numbers(0), mesh, ("R",)))
        w.grad = place(numbers(1), mesh, ("P",))
        held = w.grad.to_local() if looks else None
        change(w)
        torch.optim.SGD([w], 0.1).step()
        count = sent.get_total_counts()
        if who == "all":
            terms = DTensor.from_local(held, mesh, w.grad.placements, run_check=False)
            assert_close(terms.full_tensor(), w.grad.full_tensor())
    return [count, w.detach().full_tensor().sum().item()]


def test_a_local_tensor_that_is_held_changes_nothing(pool: Pool) -> None:
    for change, most in ((clip, 1), (add_later, 1)):
        cases = [(change, who) for who in ("nobody", "one", "all")]
        (first, *ranks), *others = pool.run_cases(look, cases, mesh=(2,))
        assert all(told == first for told in ranks)
        assert all(told == first for by_rank in others for told in by_rank)
        assert first[0] == most, "only the first use sends"


def other_reductions(mesh: DeviceMesh) -> None:
    """Averages and extremes, too, are reduced once, and written as what they are."""
    for kind in ("sum", "avg", "max", "min"):
        with convmesh.enable(), CommDebugMode() as sent:
            x = DTensor.from_local(numbers(dist.get_rank()), mesh, [Partial(kind)], run_check=False)
            (norm,) = torch._foreach_norm([x])
            torch._foreach_mul_([x], 0.5)
            torch._foreach_add_([x], 1.0)
            x.abs_()
            assert sent.get_total_counts() == 1
        both = torch.stack([numbers(0), numbers(1)])
        dense = {"sum": both.sum(0), "avg": both.mean(0), "max": both.amax(0), "min": both.amin(0)}[kind]
        assert x.placements == (Partial(kind),)
        assert_close(norm.full_tensor(), dense.norm())
        assert_close(x.full_tensor(), (dense * 0.5 + 1).abs())


def test_averages_and_extremes(pool: Pool) -> None:
    pool.run(other_reductions, mesh=(2,))


def write_locally(mesh: DeviceMesh) -> None:
    """What ranks write into their terms counts before the first use, and afterwards it is refused, not lost."""
    with convmesh.enable():
        w = nn.Parameter(place(numbers(0), mesh, ("R",)))
        w.grad = place(numbers(1), mesh, ("P",))
        w.grad.to_local().mul_(0.5)
        (norm,) = torch._foreach_norm([w.grad])
        assert_close(norm.full_tensor(), numbers(1).norm() / 2)
        w.grad.to_local().mul_(0.5)
        with pytest.raises(convmesh.ShardingError, match="written after its sum had been taken"):
            torch.optim.SGD([w], 0.1).step()
        w.grad.zero_()  # which all ranks see
        torch.optim.SGD([w], 1.0).step()
        assert_close(w.detach().full_tensor(), numbers(0))


def test_a_write_that_others_cannot_see_is_refused(pool: Pool) -> None:
    pool.run(write_locally, mesh=(2,))
