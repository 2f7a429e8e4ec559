"""Batch norm: statistics by channel over all of batch and space, however these are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

from ... import _torch
from ...kernels.batch_norm import BY_OPERATORS, Running, normalised_by_statistics
from ...kernels.batch_norm_cpu import BY_LIBRARY
from ...sharding.call import Call, Move, Moved
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour, made_of_others
from ..reductions.plan import wide
from .common import Spread, arrange, rows

aten = torch.ops.aten

# The module reads its count of batches as a number where it has no momentum.
made_of_others(aten.batch_norm.default, aten.item.default, aten.is_nonzero.default)

FORWARD = Behaviour("batch, channels, space", "training: 2 C numbers of each rank to all; all-reduce if many")
BACKWARD = Behaviour("batch, channels, space", "training: all-reduce of 2 C numbers")

STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Placed:
    """Where the tensors of a batch norm are."""

    input: Layout
    parameters: tuple[Layout | None, ...]  # and in evaluation the running statistics
    statistics: Layout
    spread: Spread

    @staticmethod
    def of(operator: str, input: Layout, parameters: tuple[Layout | None, ...], names: tuple[str, ...]) -> Placed:
        named = (("input", input), *zip(names, parameters, strict=True))
        dims = (0, *range(2, input.ndim))
        placed, *others = arrange(operator, rows(dims, ((1, 0),), len(parameters)), named)
        assert placed is not None
        by_channel = tuple(Shard(0) if p == Shard(1) else Replicate() for p in placed.placements)
        statistics = input.new((input.shape[1],), by_channel, wide(input.dtype))
        return Placed(placed, tuple(others), statistics, Spread.over(placed, dims))

    def compiled(self, *others: Layout | None) -> bool:
        """Whether the compiled library takes tensors of these layouts, if all ranks have it. Global strides say so:
        ranks that differ in it would differ in the last bits of the statistics."""
        alike = all(
            one is None or one.dtype == self.input.dtype for one in (*self.parameters, *others, self.statistics)
        )
        return alike and self.input.is_contiguous and self.input.dtype in (torch.float32, torch.float64)


def check(named: dict[str, Any]) -> None:
    """Refuse what is no batch norm of an input."""
    input: Layout = named["input"]
    if input.ndim < 2:
        raise Unfit("the input needs batch and channels", "give an input of shape (N, C, *space)")
    for name in ("weight", "bias", *STATISTICS):
        given = named.get(name)
        if given is not None and given.shape != (input.shape[1],):
            raise Unfit(f"{name} needs one number for each of the {input.shape[1]} channels",
                        f"give it shape ({input.shape[1]},)")  # fmt: skip
        if name in STATISTICS and given is not None and any(isinstance(p, Partial) for p in given.placements):
            raise Unfit(f"{name} is Partial", f"redistribute {name} to Replicate first")


@plan_rule(
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default, aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default, aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default, aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default,
    aten._native_batch_norm_legit_no_training.default,
    behaviour=FORWARD, varies=("momentum", "exponential_average_factor"),
)  # fmt: skip
def batch_norm(operator: _torch.Operator, *given: Any) -> Call:
    """Some say in their name whether they train; and functions return new running statistics."""
    named = dict(zip(_torch.signature(operator).names, given, strict=True))
    name = _torch.name_of(operator)
    check(named)
    input, weight, bias = given[:3]
    running = tuple(named[each] for each in STATISTICS if each in named)
    training = named.get("training", "with_update" in name)
    functional = "functional" in name
    if not training and (not running or None in running):
        raise Unfit("evaluation needs running statistics", "give running_mean and running_var")
    if training:
        placed = Placed.of(name, input, (weight, bias), ("weight", "bias"))
    else:
        placed = Placed.of(name, input, (weight, bias, *running), ("weight", "bias", *STATISTICS))
    saved = placed.statistics
    if not training:  # torch saves nothing then, since backward has the running statistics
        saved = saved.new((0,), saved.replicated().placements)
    results: list[Layout | Moved] = [placed.input.dense, saved, saved]
    if operator is aten.cudnn_batch_norm.default or (name.startswith("_batch_norm") and "no_training" not in name):
        results.append(saved.new((0,), saved.replicated().placements, torch.uint8))  # scratch, of which ours needs none
    if functional:
        results += running
    operands = [*(placed.input, *placed.parameters[:2]), *(running if training else placed.parameters[2:])]
    if not training:
        return Call(operands, results, _Evaluation(placed, len(results) - 3, functional))
    return Call(operands, results, _Training(placed, running, len(results) - 3, functional))


class _Evaluation:
    """By running statistics."""

    def __init__(self, placed: Placed, more: int, functional: bool):
        self._dtype, self._more, self._functional = placed.statistics.dtype, more, functional

    def __call__(self, x: Any, w: Any, b: Any, mean: Any, var: Any, *numbers: Any) -> tuple[torch.Tensor, ...]:
        y = normalised_by_statistics(x, mean.to(self._dtype), var.to(self._dtype), numbers[-1], w, b)
        nothing = mean.new_empty(0, dtype=self._dtype)
        running = (mean.clone(), var.clone()) if self._functional else ()
        scratch = (nothing,) * (self._more - len(running))
        return y, nothing, nothing, *scratch, *running


class _Training:
    """By the moments of all ranks; running statistics are moved towards them at the placements of these."""

    def __init__(self, placed: Placed, running: tuple[Layout | None, ...], more: int, functional: bool):
        self._placed, self._spread = placed, placed.spread
        self._dtype, self._functional, self._more = placed.statistics.dtype, functional, more
        self._fits = placed.compiled(*running)
        at = placed.statistics.placements
        self._to = [None if one is None else Move.of(one, one.placed(at)) for one in running]
        self._back = [None if one is None else Move.of(one.placed(at), one) for one in running]
        self._simple = not functional and not any(self._to)

    def __call__(self, x: Any, w: Any, b: Any, *rest: Any) -> tuple[Any, ...]:
        running: tuple[Any, Any] = rest[:2] if self._to else (None, None)
        compiled = self._fits and self._spread.compiled() and not _torch.any_lazy(x, w, b, *running)
        steps, x = (BY_LIBRARY, x.contiguous()) if compiled else (BY_OPERATORS, x)
        own = steps.channel_moments(x, self._dtype)
        moved: Any = running if self._simple else [*map(self._moved, self._to, running)]
        moments = self._spread.gather(own)
        merge, moving = self._spread.merging(moments), Running(moved[0], moved[1], rest[-2])
        y, mean, rstd = steps.normalised_by_ranks(x, moments, merge, rest[-1], w, b, moving)
        if self._simple and not self._more:
            return y, mean, rstd
        scratch = (mean.new_empty(0, dtype=torch.uint8),) * (self._more - 2 * self._functional)
        if self._functional:
            returned = (new if move is None else move(new) for move, new in zip(self._back, moved, strict=True))
            return y, mean, rstd, *scratch, *returned
        for move, old, new in zip(self._back, running, moved, strict=False):
            if move is not None:
                old.copy_(move(new))
        return y, mean, rstd, *scratch

    def _moved(self, move: Move | None, old: torch.Tensor | None) -> torch.Tensor | None:
        """At the placements of the statistics: a copy, unless it is to be written."""
        if old is None or (move is None and not self._functional):
            return old
        return old.clone() if move is None else move(old).clone()
