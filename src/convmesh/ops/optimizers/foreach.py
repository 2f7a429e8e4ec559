"""`_foreach_*` and `_fused_*` operators on lists of tensors, for optimizers, gradient clipping and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ... import _torch
from ...comm import all_reduce
from ...sharding.layout import Layout
from ...sharding.partial import is_partial, reduce_once
from ...sharding.registry import Behaviour, rule, tolerant, while_installed
from ...sharding.result_strides import as_on_one_device
from .tensor_lists import Lists, of_one_layout

aten = torch.ops.aten

# fmt: off
POINTWISE = (
    "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "ceil", "clamp_max", "clamp_min", "clone", "copy",
    "cos", "cosh", "div", "erf", "erfc", "exp", "expm1", "floor", "frac", "lerp", "lgamma", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin",
    "sinh", "sqrt", "sub", "tan", "tanh", "trunc",
)
# fmt: on
OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad")


FOREACH = Behaviour(
    "all dimensions; Partial(sum) where the operator is linear",
    "nothing; elsewhere one all-reduce for all Partial tensors of a call, whose sums are kept for later calls",
    "lists with plain tensors beside DTensors, shapes that differ",
)  # fmt: skip
FUSED = Behaviour(
    "all dimensions", "nothing; one all-reduce for all Partial gradients",
    "parameters, gradients or states that are plain tensors beside DTensors",
)  # fmt: skip
NORM = Behaviour("all dimensions", "one all-reduce of a value for each tensor, after one for all Partial tensors")
UNSCALE = Behaviour("all dimensions", "one all-reduce of one value, after one for all Partial tensors")


def _moved(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator for which some tensors must be redistributed or reduced first."""
    lists = Lists(operator, args, kwargs)
    local = lists.local()
    results = _torch.call(operator, local)
    if results is None:
        return lists.write_back(local)
    if isinstance(results, tuple):  # the functional form of a fused optimizer: new values for each of its first lists
        return tuple(lists.wrap(some, number) for number, some in enumerate(results))
    return lists.wrap(results)


_elsewhere = tolerant(_moved)
_elsewhere_as_on_one_device = as_on_one_device(_elsewhere)


@rule(
    *_torch.overloads(*(f"_foreach_{name}" for name in POINTWISE)),
    behaviour=FOREACH,
    knows_strides=True,
    tolerates=True,
)
@rule(
    *_torch.overloads(*(f"_fused_{name}" for name in OPTIMIZERS)), behaviour=FUSED, knows_strides=True, tolerates=True
)
def pointwise(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator on local tensors, which mostly needs no redistribution."""
    writes = operator._schema.is_mutable
    known = of_one_layout(operator, args, kwargs)
    if known is None:
        return (_elsewhere if writes else _elsewhere_as_on_one_device)(operator, args, kwargs)
    local, specs, has_gaps = known
    results = _torch.call(operator, local)
    if results is None:
        return None
    several = results if isinstance(results, tuple) else (results,)
    dtypes = [spec.tensor_meta.dtype for spec in specs]  # type: ignore[union-attr]
    if has_gaps or not all([one.dtype for one in some] == dtypes for some in several):
        return _elsewhere_as_on_one_device(operator, args, kwargs)  # results have other strides or dtypes
    wrapped = [[*map(_torch.wrap, some, specs)] for some in several]
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]


@rule(aten._foreach_zero_.default, behaviour=Behaviour("all dimensions, Partial(sum)", "nothing"))
def zero(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Zero all tensors; a sum of zeros is zero, so nothing has to be reduced."""
    _torch.call(operator, Lists(operator, args, kwargs, reduce=False).local())


@rule(*_torch.overloads("_foreach_norm", "_foreach_max"), behaviour=NORM)
def reduction(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """One value per tensor: every rank reduces its shards, and the values of all tensors are all-reduced together."""
    lists = Lists(operator, args, kwargs)
    tensors, *options = lists.local()
    order, dtype = (float(options[0]), options[1]) if options else (inf, None)
    alike: dict[Any, list[int]] = {}
    for number, (local, target) in enumerate(zip(tensors, lists.targets, strict=True)):
        mesh_dims = (
            () if target is None else tuple(sorted(dim for dims in target.sharded_dims.values() for dim in dims))
        )
        alike.setdefault((None if target is None else target.mesh, mesh_dims, local.dtype), []).append(number)
    results: list[torch.Tensor] = list(tensors)
    for (mesh, mesh_dims, own), numbers in alike.items():
        wide = dtype or (torch.float32 if own in (torch.float16, torch.bfloat16) else own)
        parts = [tensors[number] for number in numbers]
        whole = _combined(_of_parts(operator, parts, [order, wide] if options else []), mesh, mesh_dims, order)
        for number, value in zip(numbers, whole.to(dtype or own.to_real()).unbind(), strict=True):
            results[number] = value
    return [
        value if target is None else _torch.wrap(value, _scalar(target, value.dtype).spec)
        for value, target in zip(results, lists.targets, strict=True)
    ]


def _of_parts(operator: _torch.Operator, parts: list[torch.Tensor], options: list[Any]) -> torch.Tensor:
    """Reduce each of this rank's shards. An empty one gets the neutral element."""
    filled = [part for part in parts if part.numel()]
    values = iter(_torch.call(operator, [filled, *options]) if filled else ())
    dtype = (options[1] if options else parts[0].dtype).to_real()
    lowest = -inf if dtype.is_floating_point else torch.iinfo(dtype).min
    nothing = (inf if options[0] < 0 else 0) if options else lowest
    return torch.stack([next(values) if part.numel() else part.new_full((), nothing, dtype=dtype) for part in parts])


def _combined(values: torch.Tensor, mesh: DeviceMesh | None, mesh_dims: Sequence[int], order: float) -> torch.Tensor:
    """Combine the ranks' norms (or maxima) of their shards to those of the full tensors."""
    if mesh is None or mesh.get_coordinate() is None or not mesh_dims:
        return values
    if order in (inf, -inf):
        return all_reduce(values, mesh, mesh_dims, "max" if order > 0 else "min")
    if order == 0:
        return all_reduce(values, mesh, mesh_dims)
    return all_reduce(values.pow(order), mesh, mesh_dims).pow(1 / order)


def _scalar(target: Layout, dtype: torch.dtype) -> Layout:
    return Layout(target.mesh, (Replicate(),) * target.mesh.ndim, (), (), dtype)


@rule(aten._amp_foreach_non_finite_check_and_unscale_.default, behaviour=UNSCALE)
def unscale(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale all gradients. If one rank finds an overflow in any of them, all ranks have to skip the step."""
    lists = Lists(operator, args, kwargs)
    local = lists.local()
    _torch.call(operator, local)
    lists.write_back(local)
    found = local[1]
    sharded_over: dict[DeviceMesh, set[int]] = {}
    for target in lists.targets:
        if target is not None and target.present:
            sharded_over.setdefault(target.mesh, set()).update(
                dim for dims in target.sharded_dims.values() for dim in dims
            )
    for mesh, mesh_dims in sharded_over.items():
        found.copy_(all_reduce(found, mesh, sorted(mesh_dims), "max"))
    if isinstance(args[1], DTensor) and found is not _torch.local_of(args[1]):
        _torch.local_of(args[1]).copy_(found)


# While an optimizer steps, by its id: (parameter, gradient before, gradient during the step).
_stepping: dict[int, list[tuple[torch.Tensor, DTensor, DTensor]]] = {}


def reduce_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: reduce all Partial gradients at once, and give the parameters the sums until the step is over.

    What an optimizer derives from a gradient, such as momentum, then has the parameter's placements.
    """
    if torch.compiler.is_compiling():
        return
    given: list[tuple[torch.Tensor, DTensor]] = []
    like: dict[int, DTensor] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            if isinstance(parameter, DTensor) and _is_settled(gradient.placements, parameter.placements):
                continue  # nearly always
            given.append((parameter, gradient))
            if isinstance(parameter, DTensor) and parameter.device_mesh == gradient.device_mesh:
                like[id(gradient)] = parameter
    like = {key: parameter for key, parameter in like.items() if not is_partial(parameter)}
    sums = reduce_once([gradient for _, gradient in given], like)
    _stepping[id(optimizer)] = [
        (parameter, gradient, sums[id(gradient)]) for parameter, gradient in given if id(gradient) in sums
    ]
    for parameter, _, sum in _stepping[id(optimizer)]:
        parameter.grad = sum


@lru_cache(maxsize=1024)
def _is_settled(gradient: tuple[Placement, ...], parameter: tuple[Placement, ...]) -> bool:
    """Whether a gradient lies where its parameter does, and is Partial nowhere."""
    return gradient == parameter and not any(isinstance(placement, Partial) for placement in gradient)


def give_gradients_back(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After a step: restore the gradients, except where a closure has made new ones."""
    for parameter, gradient, sum in _stepping.pop(id(optimizer), ()):
        if parameter.grad is sum:
            parameter.grad = gradient


while_installed(lambda: register_optimizer_step_pre_hook(reduce_gradients).remove)
while_installed(lambda: register_optimizer_step_post_hook(give_gradients_back).remove)
