"""Elementwise operators: each rank computes on its own shard, however uneven the shards are.

torch's DTensor gathers where a dimension is shorter than the number of ranks, and where an uneven shard meets a tensor
that is broadcast along it. A network has hundreds of these calls, so the common case does as little as possible.
"""

from __future__ import annotations

from cmath import isfinite
from functools import wraps
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.implicit_replication import as_replicated
from ...sharding.partial import cached_sum, is_partial, reduce_once, write_sum_back
from ...sharding.plan_cache import PlanTable
from ...sharding.redistribute import move, specs_of
from ...sharding.registry import Behaviour, made_of_others, rule, tolerant
from .pointwise_plan import PointwisePlan, Step, is_number, plan_pointwise

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
DIVISIONS = _torch.overloads("div")
# These have their own rule, `scale`.
OWN_RULE = (aten.div.Scalar, aten.mul.Scalar, aten.neg.default)

STAYS = "all dimensions; Partial(sum) and Partial(avg) where the operator is linear"
POINTWISE = Behaviour(
    STAYS, "nothing; operands that are sharded differently; Partial operands are reduced where it is not linear",
)  # fmt: skip
IN_PLACE = Behaviour(
    STAYS,
    "nothing; operands that are sharded differently; values written into a slice of a sharded dimension, to their "
    "owners",
)  # fmt: skip
COPIED = ("clone", "_to_copy")
OPERATORS = [
    operator
    for operator in _torch.overloads(*UNARY, *SEVERAL, *(f"{name}_backward" for name in BACKWARD), *COPIED)
    if operator not in OWN_RULE and _torch.gives_one_tensor(operator) and not _torch.is_composite(operator)
] + [aten.copy_.default]

made_of_others(
    *_torch.overloads("clip", "divide", "multiply", "negative", "positive", "relu6", "selu", "square", "subtract"),
    *_torch.overloads("true_divide"), aten.isfinite.default, aten.max.other, aten.min.other,
    aten.where.Scalar, aten.where.ScalarOther, aten.where.ScalarSelf,
)  # fmt: skip


def _handler(operator: _torch.Operator) -> _torch.Handler:
    """Make the rule of one operator, which caches its plans by the specs of the operands."""
    plans = PlanTable()
    known, writes = plans.plans, operator._schema.is_mutable

    @wraps(plan_pointwise)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = _torch.opened(args, numbers=False)
        if opened is not None:
            specs, values, _, mesh = opened
            plan = known.get(_key(specs, kwargs))
            if plan is not None and plan.is_local and plan.output.mesh is mesh:
                for number, made_usual in plan.restrided:
                    values[number] = made_usual(values[number])
                result = operator(*values, **kwargs)
                if writes:
                    return args[0]
                return _torch.wrap(result, plan.specs.get(result.dtype) or plan.spec(result.dtype))
        return unknown(operator, args, kwargs)

    @tolerant
    def unknown(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle calls that are new or traced, need communication, or have plain tensors beside DTensors.

        Plain tensors of one element are replicated.
        """
        mesh = next(arg.device_mesh for arg in args if isinstance(arg, DTensor))
        args = tuple(as_replicated(arg, mesh) if _is_plain_number(arg) else arg for arg in args)
        tensors = [arg if isinstance(arg, torch.Tensor) else None for arg in args]
        specs = specs_of(operator._schema.name, [(f"operand {n}", tensor) for n, tensor in enumerate(tensors)])
        plan = plans.look_up(_key(specs, kwargs), lambda: plan_pointwise(operator, args, kwargs, specs))
        return _run(run, operator, args, kwargs, plan)

    return run


def _key(specs: list[_torch.Spec | None], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return what a plan depends on. Numbers are left out: they change from step to step."""
    return (*specs, kwargs.get("dtype"), kwargs.get("memory_format")) if kwargs else tuple(specs)


for _operator in OPERATORS:
    _writes = _operator._schema.is_mutable
    rule(_operator, behaviour=IN_PLACE if _writes else POINTWISE, knows_strides=True, tolerates=True)(
        _handler(_operator)
    )


def _is_plain_number(arg: Any) -> bool:
    if not isinstance(arg, torch.Tensor) or isinstance(arg, DTensor) or arg.numel() != 1:
        return False
    return not arg.requires_grad or _torch.in_backward()  # each rank would train its own copy of a parameter


def _run(
    rule: _torch.Handler, operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], plan: PointwisePlan
) -> Any:
    """Run a plan whose operands may have to be redistributed or narrowed first."""
    if plan.use_torch:
        return _torch.stock(operator, args, kwargs)
    on_sums = plan.reduces or (plan.writes_terms and _sum_is_known(*args))
    if on_sums or (plan.scales and _makes_infinite(operator, args)):
        return _run_reduced(rule, operator, args, kwargs)
    values = [_torch.local_of(arg) if isinstance(arg, DTensor) else arg for arg in args]
    if plan.output.present and not plan.is_local:
        values = [_prepare_operand(arg, value, step) for arg, value, step in zip(args, values, plan.steps, strict=True)]
    result = operator(*values, **kwargs)
    return args[0] if operator._schema.is_mutable else _torch.wrap(result, plan.spec(result.dtype))


def _sum_is_known(target: DTensor, *others: Any) -> bool:
    """Whether the target's sum is cached, and no other operand is Partial, which would have to be reduced as well."""
    return cached_sum(target) is not None and not any(
        isinstance(other, DTensor) and is_partial(other) for other in others
    )


def _prepare_operand(tensor: Any, local: Any, step: Step | None) -> Any:
    """Redistribute and narrow one operand."""
    if step is None:
        return local
    if step.moved is not None:
        local = move(tensor, step.moved)
    for dim, start, length in step.narrows:
        local = local.narrow(dim, start, length)
    return local.new_zeros(()).expand(local.shape) if step.zero else local


def _makes_infinite(operator: _torch.Operator, args: tuple[Any, ...]) -> bool:
    """Whether a number makes terms of a sum infinite or NaN: their signs may differ from the sum's."""
    numbers = [arg for arg in args if is_number(arg)]
    return any(not isfinite(number) or (number == 0 and operator in DIVISIONS) for number in numbers)


def _run_reduced(
    rule: _torch.Handler, operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Run on the sums of Partial tensors: term by term is not possible, or the sums are cached anyway."""
    sums = reduce_once([arg for arg in args if isinstance(arg, DTensor) and is_partial(arg)])
    result: DTensor = rule(operator, tuple(sums.get(id(arg), arg) for arg in args), kwargs)
    if not operator._schema.is_mutable:
        return result
    target: DTensor = args[0]
    write_sum_back(target, sums[id(target)])
    return target
