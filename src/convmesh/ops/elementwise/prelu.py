"""The gradient of PReLU, elementwise like its value (for which DTensor has a rule of its own)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule
from ...sharding.sharding_table import Row, choose, input_placements, output_placements

OPERATOR = torch.ops.aten._prelu_kernel_backward.default
BEHAVIOUR = Behaviour("any dimension", "nothing", "nothing; a pending sum is reduced first")


@dataclass(frozen=True)
class Plan:
    operands: tuple[Layout, ...]
    output: Layout
    takes_part: bool


@rule(OPERATOR, behaviour=BEHAVIOUR)
def prelu_backward(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Both gradients have the input's shape: torch itself sums the weight's over what it was broadcast along."""
    gradient, input, weight = _torch.arguments(operator, args, kwargs)
    plan = _plan(*specs_of("prelu_backward", (("grad_output", gradient), ("input", input), ("weight", weight))))
    if not plan.takes_part:
        empty = _torch.local_of(gradient).new_empty(0)
        return _torch.wrap(empty, plan.output.spec), _torch.wrap(empty, plan.output.spec)
    results = OPERATOR(*map(move, (gradient, input, weight), plan.operands))
    gx, gw = (_torch.wrap(r.contiguous(memory_format=plan.output.memory_format), plan.output.spec) for r in results)
    return gx, gw


@planned
def _plan(*specs: _torch.Spec) -> Plan:
    names = ("grad_output", "input", "weight")
    layouts = layouts_of("prelu_backward", list(zip(names, specs, strict=True)))
    _, input, weight = layouts
    rows = [Row("replicated", (Replicate(),) * 3, (Replicate(),))]
    for dim, size in enumerate(input.shape):
        ours = Shard(dim) if len(weight.shape) == len(input.shape) and weight.shape[dim] == size else Replicate()
        rows.append(Row("elementwise", (Shard(dim), Shard(dim), ours), (Shard(dim),)))
    chosen = choose("prelu_backward", rows, list(zip(names, layouts, strict=True)))
    operands = tuple(layout.placed(input_placements(chosen, number)) for number, layout in enumerate(layouts))
    output = input.placed(output_placements(chosen, 0)).dense
    return Plan(operands, output, input.mesh.get_coordinate() is not None)
