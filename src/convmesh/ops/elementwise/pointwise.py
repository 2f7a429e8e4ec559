"""Elementwise operators on DTensors: each rank works on its own part, however uneven the parts are.

torch's DTensor gathers where a dimension has fewer indices than the mesh has ranks, and where uneven parts meet a
tensor that is broadcast along them. A network has hundreds of these calls, so the common case does as little as it can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.implicit_replication import the_same_everywhere
from ...sharding.partial import is_pending, kept, put_back, reduce_once
from ...sharding.plan_cache import Table
from ...sharding.redistribute import move, specs_of
from ...sharding.registry import Behaviour, made_of_others, overloads, rule
from .pointwise_plan import Step, plan_pointwise

aten = torch.ops.aten

# fmt: off
UNARY = (
    "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atanh", "bitwise_not", "ceil", "celu", "conj_physical",
    "cos", "cosh", "deg2rad", "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac",
    "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "i0", "isinf", "isnan", "isneginf", "isposinf",
    "leaky_relu", "lgamma", "log", "log10", "log1p", "log2", "logical_not", "logit", "mish", "mvlgamma", "nan_to_num",
    "neg", "rad2deg", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "signbit", "silu", "sin",
    "sinc", "sinh", "softplus", "softshrink", "special_entr", "special_erfcx", "special_i0e", "special_i1",
    "special_i1e", "special_log_ndtr", "special_ndtri", "sqrt", "tan", "tanh", "threshold", "trunc",
)
SEVERAL = (
    "__ilshift__", "__irshift__", "__lshift__", "__rshift__", "_prelu_kernel", "add", "addcdiv", "addcmul", "atan2",
    "bitwise_and", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "clamp", "clamp_max",
    "clamp_min", "complex", "copysign", "div", "eq", "floor_divide", "fmax", "fmin", "fmod", "gcd", "ge", "gt",
    "heaviside", "hypot", "igamma", "igammac", "lcm", "ldexp", "le", "lerp", "logaddexp", "logaddexp2", "logical_and",
    "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "nextafter", "polar", "pow",
    "remainder", "rsub", "special_xlog1py", "special_zeta", "sub", "where", "xlogy",
)
BACKWARD = (
    "elu", "gelu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logit", "mish",
    "native_dropout", "sigmoid", "silu", "softplus", "softshrink", "tanh", "threshold",
)
# fmt: on
# These have a rule of their own, in `scale`.
APART = (aten.div.Scalar, aten.mul.Scalar, aten.neg.default)

POINTWISE = Behaviour(
    "all dimensions; Partial sums and averages where the operator is linear in them",
    "nothing; operands with other layouts; elsewhere what is Partial",
)  # fmt: skip
IN_PLACE = Behaviour(
    "all dimensions; Partial sums and averages where the operator is linear in them",
    "operands with other layouts; a part of a sharded dimension, back to its owners",
)  # fmt: skip
COPIED = ("clone", "_to_copy")
OPERATORS = [
    operator
    for operator in overloads(*UNARY, *SEVERAL, *(f"{name}_backward" for name in BACKWARD), *COPIED)
    if operator not in APART and _torch.gives_one_tensor(operator) and not _torch.is_composite(operator)
] + [aten.copy_.default]
WRITING = frozenset(operator for operator in OPERATORS if operator._schema.is_mutable)

made_of_others(
    *overloads("clip", "divide", "multiply", "negative", "positive", "relu6", "selu", "square", "subtract"),
    *overloads("true_divide"), aten.isfinite.default, aten.max.other, aten.min.other,
    aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf,
)  # fmt: skip

_table = Table()
_plans = _table.plans


def _key(operator: _torch.Operator, specs: tuple[_torch.Spec | None, ...], kwargs: dict[str, Any]) -> Any:
    """What a plan depends on. Numbers, which change from step to step, are not among it."""
    return (operator, specs, kwargs.get("dtype"), kwargs.get("memory_format")) if kwargs else (operator, specs)


@rule(*WRITING, behaviour=IN_PLACE)
@rule(*(operator for operator in OPERATORS if operator not in WRITING), behaviour=POINTWISE, knows_strides=True)
def pointwise(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    opened = _torch.opened(args)
    if opened is None:
        return _with_care(operator, args, kwargs)
    specs, values, mesh = opened
    plan = _plans.get(_key(operator, specs, kwargs))
    if plan is None or not plan.ready or plan.output.mesh is not mesh:
        return _moved(operator, args, kwargs, specs, values)
    result = operator(*values, **kwargs)
    if operator in WRITING:
        return args[0]
    return _torch.wrap(result, plan.specs.get(result.dtype) or plan.spec(result.dtype))


def _with_care(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """While tracing, where a collective is under way, or beside plain tensors: those of one element are replicated."""
    mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
    placed = tuple(the_same_everywhere(arg, mesh) if _is_plain_number(arg) else arg for arg in args)
    tensors = [arg if isinstance(arg, torch.Tensor) else None for arg in placed]
    specs = tuple(specs_of(operator._schema.name, [(f"operand {n}", tensor) for n, tensor in enumerate(tensors)]))
    values = [_torch.local_of(arg) if isinstance(arg, DTensor) else arg for arg in placed]
    return _moved(operator, placed, kwargs, specs, values)


def _is_plain_number(arg: Any) -> bool:
    if not isinstance(arg, torch.Tensor) or isinstance(arg, DTensor) or arg.numel() != 1:
        return False
    return not arg.requires_grad or _torch.in_backward()  # a parameter on each rank would be trained by itself


def _moved(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any],
    specs: tuple[_torch.Spec | None, ...], values: list[Any],
) -> Any:  # fmt: skip
    """Where operands may have to be redistributed or narrowed before they are used."""
    plan = _table.look_up(_key(operator, specs, kwargs), lambda: plan_pointwise(operator, args, kwargs, specs))
    if plan.leaves:
        return _torch.stock(operator, args, kwargs)
    if plan.reduces or (plan.writes_terms and _sum_is_known(*args)):
        return _reduced(operator, args, kwargs)
    if plan.output.present:
        values = [_brought(arg, value, step) for arg, value, step in zip(args, values, plan.steps, strict=True)]
    result = operator(*values, **kwargs)
    return args[0] if operator._schema.is_mutable else _torch.wrap(result, plan.spec(result.dtype))


def _sum_is_known(target: DTensor, *others: Any) -> bool:
    """And nothing else is Partial, of which the sum would have to be taken for it."""
    return kept(target) is not None and not any(isinstance(other, DTensor) and is_pending(other) for other in others)


def _brought(tensor: Any, local: Any, step: Step | None) -> Any:
    if step is None:
        return local
    if step.moved is not None:
        local = move(tensor, step.moved)
    for dim, start, length in step.narrows:
        local = local.narrow(dim, start, length)
    return local.new_zeros(()).expand(local.shape) if step.zero else local


def _reduced(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Write into the sum of a Partial tensor what cannot be written term by term, or need not be: the sum is known."""
    target: DTensor = args[0]
    sum = reduce_once([target])[id(target)]
    pointwise(operator, (sum, *args[1:]), kwargs)
    put_back(target, sum)
    return target
