"""Random operators where the value of an element decides how many numbers one device draws for it.

How many it has drawn before a shard depends on all values before it. So every rank gathers the operands, draws
everything as one device does, and keeps its shard.
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
from .replicated_draw import STAYS, drawing_layout, narrowed

aten = torch.ops.aten

REPLICATED = "the input is gathered: how many numbers are drawn depends on it, so every rank draws all of them"
VALUE_DEPENDENT = Behaviour(STAYS, REPLICATED)
MULTINOMIAL = Behaviour("none: the result is replicated", REPLICATED)


@plan_rule(
    aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten._sample_dirichlet.default,
    behaviour=VALUE_DEPENDENT, varies=("generator",),
)  # fmt: skip
def value_dependent(operator: _torch.Operator, *arguments: Any) -> Call:
    layout = drawing_layout(arguments[0]).dense

    def run(*values: Any) -> torch.Tensor:
        own = tuple(layout.own(dim) for dim in range(layout.ndim))
        note(layout, values[0].device, values[-1])
        return narrowed(_draw_full(operator, arguments, values), own).clone()  # so that the full tensor is freed

    return Call([argument.replicated() for argument in arguments if isinstance(argument, Layout)], layout, run)


@plan_rule(aten.multinomial.default, behaviour=MULTINOMIAL, varies=("generator",))
def multinomial(operator: _torch.Operator, input: Layout, samples: int, *how: Any) -> Call:
    layout = input.replicated().new((*input.shape[:-1], samples), dtype=torch.int64)

    def run(*values: Any) -> torch.Tensor:
        note(layout, values[0].device, values[-1])
        return _draw_full(operator, (input,), values)

    return Call((input.replicated(),), layout, run)


def _draw_full(operator: _torch.Operator, arguments: Sequence[Any], values: Sequence[Any]) -> torch.Tensor:
    """Draw all numbers, with operands in one device's storage order."""
    pairs = zip_longest(arguments, values)
    result: torch.Tensor = _torch.call(
        operator, [argument.laid(value) if isinstance(argument, Layout) else value for argument, value in pairs]
    )
    return result
