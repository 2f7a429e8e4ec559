"""Random operators of which one device draws as many numbers for an element as its value asks for.

How many it has drawn before a shard nobody knows without the values before it. So every rank gets all of the operands,
draws everything, as one device does, and keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from ... import _torch
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.registry import Behaviour
from .noted_draws import note
from .replicated_draw import narrowed, where_drawn

aten = torch.ops.aten

REPLICATED = "all-gather: every rank draws all numbers, of which there are as many as the values ask for"
BY_VALUE = Behaviour("all; the numbers are those of one device, if all ranks have the same seed", REPLICATED)
MULTINOMIAL = Behaviour("nothing: the result is replicated", REPLICATED)


@plan_rule(
    aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten._sample_dirichlet.default,
    behaviour=BY_VALUE, varies=("generator",),
)  # fmt: skip
def by_value(operator: _torch.Operator, *given: Any) -> Call:
    layout = where_drawn(given[0]).dense

    def run(*values: Any) -> torch.Tensor:
        own = tuple(layout.own(dim) for dim in range(layout.ndim))
        note(layout, values[0].device, values[-1])
        return narrowed(_drawn(operator, given, values), own).clone()  # a copy, so that the full tensor goes

    return Call([one.replicated() for one in given if isinstance(one, Layout)], layout, run)


@plan_rule(aten.multinomial.default, behaviour=MULTINOMIAL, varies=("generator",))
def multinomial(operator: _torch.Operator, input: Layout, samples: int, *how: Any) -> Call:
    layout = input.replicated().new((*input.shape[:-1], samples), dtype=torch.int64)

    def run(*values: Any) -> torch.Tensor:
        note(layout, values[0].device, values[-1])
        return _drawn(operator, (input,), values)

    return Call((input.replicated(),), layout, run)


def _drawn(operator: _torch.Operator, given: Sequence[Any], values: Sequence[Any]) -> torch.Tensor:
    """All numbers, in one device's order of memory."""
    pairs = zip_longest(given, values)
    made: torch.Tensor = _torch.call(
        operator, [one.laid(value) if isinstance(one, Layout) else value for one, value in pairs]
    )
    return made
