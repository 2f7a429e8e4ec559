"""The gradients of batch norm: two sums by channel over all ranks, and the rest is local."""

from __future__ import annotations

from typing import Any

import torch

from ... import _torch
from ...kernels.batch_norm import BY_OPERATORS
from ...kernels.batch_norm_cpu import BY_LIBRARY
from ...sharding.call import Call, Moved
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from .batch_norm import BACKWARD, STATISTICS, Placed, check
from .common import parameter_gradient

aten = torch.ops.aten

GRADIENT = ("grad_out", "grad_output")


@plan_rule(
    aten.native_batch_norm_backward.default, aten.batch_norm_backward.default,
    aten.cudnn_batch_norm_backward.default, aten.miopen_batch_norm_backward.default, behaviour=BACKWARD,
)  # fmt: skip
def batch_norm_backward(operator: _torch.Operator, *given: Any) -> Call:
    """Those of cudnn and miopen are of training, and give all gradients."""
    names = _torch.signature(operator).names
    named = dict(zip(names, given, strict=True))
    check(named)
    input, weight = named["input"], named["weight"]
    training = named.get("train", named.get("update", True))
    mask = named.get("output_mask", (True, True, True))
    running = () if training else tuple(named[name] for name in STATISTICS)
    placed = Placed.of(
        _torch.name_of(operator), input, (weight, *running), ("weight", *(STATISTICS if running else ()))
    )
    gradient = next(named[name] for name in GRADIENT if name in named)
    plain = placed.statistics.typed(input.dtype if weight is None else weight.dtype)
    parameter = Moved(*parameter_gradient(weight or plain, placed.input, plain, pending=not training))
    where: dict[str, Layout | None] = {
        **dict.fromkeys(GRADIENT, gradient.placed(placed.input.placements)), "input": placed.input,
        "weight": placed.parameters[0], **dict(zip(STATISTICS, placed.parameters[1:], strict=False)),
    }  # fmt: skip
    if training:
        saved = [name for name in names if name.startswith("save_")]
        where |= {name: placed.statistics.typed(named[name].dtype) for name in saved if named[name] is not None}
    run = _Gradients(names, placed, training, mask, gradient)
    operands = [where.get(names[number]) for number in _torch.signature(operator).places]
    results: list[Layout | Moved] = [placed.input.dense, parameter, parameter]
    return Call(operands, [one if asked else None for one, asked in zip(results, mask, strict=True)], run)


class _Gradients:
    """That of the input, if asked for, and of weight and bias: sums over all ranks if the moments are theirs."""

    def __init__(self, names: tuple[str, ...], placed: Placed, training: bool, mask: Any, gradient: Layout):
        self._at = [_place(names, *which) for which in (GRADIENT, ("input",), ("weight",))]
        moments = (("save_mean",), ("save_invstd", "save_var")) if training else ((name,) for name in STATISTICS)
        self._moments = [_place(names, *which) for which in moments]
        self._eps = _place(names, "eps", "epsilon")
        self._training, self._mask = training, mask
        self._spread, self._dtype, self._count = placed.spread, placed.statistics.dtype, placed.spread.count
        self._fits = placed.compiled(gradient) and gradient.is_contiguous

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        gy, x, w = [values[number] for number in self._at]
        mean, rstd = [values[number] for number in self._moments]
        if mean.dtype != self._dtype:
            mean, rstd = mean.to(self._dtype), rstd.to(self._dtype)
        if not self._training:
            rstd = (rstd + values[self._eps]).rsqrt()
        compiled = self._fits and self._spread.compiled() and not _torch.any_lazy(gy, x, w, mean, rstd)
        steps = BY_LIBRARY if compiled else BY_OPERATORS
        if compiled:
            gy, x, mean, rstd = gy.contiguous(), x.contiguous(), mean.contiguous(), rstd.contiguous()
        sums = steps.channel_sums(gy, x, mean, rstd)
        gx = None
        if self._training:
            sums = self._spread.total(sums)
            if self._mask[0]:
                gx = steps.gradient_by_sums(gy, x, mean, rstd, w, sums, self._count)
        elif self._mask[0]:
            gx = gy * (rstd if w is None else rstd * w).view(-1, *[1] * (x.dim() - 2))
        for_weight, for_bias = sums.unbind()
        return gx, for_weight, for_bias


def _place(names: tuple[str, ...], *which: str) -> int:
    """Of the argument that has one of these names."""
    return next(number for number, name in enumerate(names) if name in which)
