"""Losses against one process: value and gradient, however unevenly the shards weigh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.harness import Pool
from tests.ops.agreement import Sample, agree

Function = Callable[..., Any]
REDUCTIONS = ("mean", "sum", "none")


def _of(function: Function, reduction: str, **options: Any) -> Function:
    return lambda x, t, *rest: function(x, t, reduction=reduction, **options)


ELEMENTWISE: dict[str, Function] = {
    f"{name} {reduction}": _of(function, reduction)
    for name, function in {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss,
        "huber": F.huber_loss,
        "bce": F.binary_cross_entropy,
        "bce_with_logits": F.binary_cross_entropy_with_logits,
        "soft_margin": F.soft_margin_loss,
    }.items()
    for reduction in REDUCTIONS
} | {
    "kl_div mean": lambda x, t, *_: torch.kl_div(x, t, 1),  # F.kl_div warns of its mean
    "kl_div sum": _of(F.kl_div, "sum"),
    "kl_div none": _of(F.kl_div, "none"),
    "kl_div batchmean": _of(F.kl_div, "batchmean"),
    "bce weighted": lambda x, t, w, _: F.binary_cross_entropy(x, t, w),
    "bce_with_logits weighted": lambda x, t, w, p: F.binary_cross_entropy_with_logits(x, t, w, pos_weight=p),
}


def _classes(reduction: str, weighted: bool, loss: Function = F.cross_entropy, **options: Any) -> Function:
    return lambda x, t, w: loss(x, t, w if weighted else None, reduction=reduction, **options)


CLASSES: dict[str, Function] = {
    f"cross_entropy {reduction}{' weighted' * weighted}{f' {options}' * bool(options)}": _classes(
        reduction, weighted, **options
    )
    for reduction in REDUCTIONS
    for weighted in (False, True)
    for options in ({}, {"ignore_index": 1}, {"label_smoothing": 0.2, "ignore_index": 2})
} | {f"nll {reduction}": _classes(reduction, True, F.nll_loss) for reduction in REDUCTIONS}

PLACES = {
    (2,): [(0,), (1,), (2,), (3,), ("P",), ("R",)],
    (4,): [(0,), (1,), (3,)],
    (2, 2): [(0, 2), (1, 3), (2, 2), ("P", 3), (1, 1)],
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def elementwise(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], tuple[Any, ...]]) -> None:
    name, at, target_at = case
    tensors = [*(numbers(5, 6, 4, 5, seed=seed) for seed in range(3)), numbers(6, 1, 1, seed=3)]
    sample = Sample(tensors, [at, target_at, at, ("R",) * len(at)], [True, False, False, False])
    agree(mesh, ELEMENTWISE[name], sample)


def classes(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], int]) -> None:
    """Targets of a kind that shards hold unevenly: nearly all of the first sample's are the same class."""
    name, at, spatial = case
    shape = (5, 6, *(4, 5, 3)[:spatial])
    generator = torch.Generator().manual_seed(7)
    target = torch.randint(0, 6, (shape[0], *shape[2:]), generator=generator)
    target[0] = 1
    target_at = tuple("R" if p in (1, "P") else p - (p > 1) if isinstance(p, int) else p for p in at)
    tensors = [numbers(*shape), target, numbers(6, seed=3)]
    agree(mesh, CLASSES[name], Sample(tensors, [at, target_at, ("R",) * len(at)], [True, False, False]))


@pytest.mark.parametrize("mesh", PLACES)
def test_elementwise_losses_agree_with_one_process(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [(name, at, at) for name in ELEMENTWISE for at in PLACES[mesh] if "P" not in at]
    cases += [(name, at, ("R",) * len(at)) for name in ("mse mean", "bce none") for at in PLACES[mesh]]
    pool.run_cases(elementwise, cases, mesh=mesh, share=1 / 3)


@pytest.mark.parametrize("mesh", PLACES)
def test_losses_over_classes_agree_with_one_process(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(classes, [(name, at, 2) for name in CLASSES for at in PLACES[mesh]], mesh=mesh, share=1 / 3)


def test_losses_over_classes_in_other_dimensions(pool: Pool) -> None:
    some = ("cross_entropy mean weighted", "cross_entropy none", "nll sum")
    cases = [(name, at, d) for name in some for d, at in ((0, (0, 1)), (1, (0, 2)), (3, (3, 4)), (3, (2, 1)))]
    pool.run_cases(classes, cases)


def along_a_direction(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    """By differentiating the backward pass by what it is given, which is one gradient for each element then."""
    name, at = case

    def change(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        jvp = torch.autograd.functional.jvp(lambda x: ELEMENTWISE[name](x, target), x, x.detach(), create_graph=True)
        rate: torch.Tensor = jvp[1]
        return rate

    agree(mesh, change, Sample([numbers(5, 6, 4), numbers(5, 6, 4, seed=1)], [at, at], [True, False]))


def test_losses_can_be_differentiated_along_a_direction(pool: Pool) -> None:
    some = [f"{loss} {reduction}" for loss in ("mse", "huber", "bce_with_logits") for reduction in REDUCTIONS]
    pool.run_cases(along_a_direction, [(name, at) for name in some for at in ((0,), (2,), ("R",))], mesh=(2,))


def refuse_wrong_target(mesh: DeviceMesh) -> None:
    x, target = numbers(4, 3, 2), torch.tensor([[0, 1]] * 3 + [[2, 3]])
    with convmesh.enable():
        input = place(x, mesh, (0,))
        for reduction in ("mean", "none"):
            with pytest.raises(IndexError, match="1 targets are neither ignored nor one of 3 classes"):
                F.cross_entropy(input, place(target, mesh, (0,)), reduction=reduction)


def test_a_target_that_is_no_class_is_an_error_on_all_ranks(pool: Pool) -> None:
    pool.run(refuse_wrong_target, mesh=(2,))
