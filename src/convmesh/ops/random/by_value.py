"""Random operators of which one device draws as many numbers for an element as its value asks for.

How many it has drawn before a shard nobody knows without the values before it. So every rank gets all of the operands,
draws everything, as one device does, and keeps its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, rule
from .replicated_draw import cut_out, where_drawn

aten = torch.ops.aten

WHOLE = "all-gather: every rank draws all numbers, of which there are as many as the values ask for"
BY_VALUE = Behaviour("all; the numbers are those of one device, if all ranks have the same seed", WHOLE)
MULTINOMIAL = Behaviour("nothing: the result is replicated", WHOLE)


@rule(
    aten.poisson.default, aten.binomial.default, aten._standard_gamma.default, aten._sample_dirichlet.default,
    behaviour=BY_VALUE,
)  # fmt: skip
def by_value(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    layout = where_drawn(_torch.spec_of(args[0]), None).dense
    drawn = _drawn(operator, args, kwargs)
    if drawn is None:
        return layout.absent(args[0])
    own = cut_out(drawn, tuple(layout.own(dim) for dim in range(layout.ndim)))
    return layout.wrap(own.clone())  # a copy, so that the whole goes


@rule(aten.multinomial.default, behaviour=MULTINOMIAL)
def multinomial(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, samples = args[:2]
    layout = Layout.of(_torch.spec_of(input)).replicated().new((*input.shape[:-1], samples), dtype=torch.int64)
    drawn = _drawn(operator, args, kwargs)
    return layout.absent(input) if drawn is None else layout.wrap(drawn)


def _drawn(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """All numbers; None on a rank outside of the mesh."""
    named = [(f"tensor {number}", value) for number, value in enumerate(args) if isinstance(value, torch.Tensor)]
    check_placed(_torch.name_of(operator), named)
    if args[0].device_mesh.get_coordinate() is None:
        return None
    return operator(*map(_whole, args), **kwargs)  # type: ignore[no-any-return]


def _whole(value: Any) -> Any:
    """All of an operand, in one device's order of memory, in which numbers are drawn."""
    if not isinstance(value, DTensor):
        return value
    layout = Layout.of(_torch.spec_of(value)).replicated()
    return layout.laid(move(value, layout))
