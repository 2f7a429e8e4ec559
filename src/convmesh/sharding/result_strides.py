"""Strides of results as on one device.

What is a view on one device must be a view here, a copy must be a copy, and random numbers are drawn in storage order:
all of that follows from strides. So a result gets the strides that the operator returns on one device for arguments of
these sizes and strides. torch's fake tensors know them for nearly every operator.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import starmap, zip_longest
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from ..strides import Stride, dense_stride
from . import copy_notes
from .layout import Layout
from .plan_cache import PlanTable

aten = torch.ops.aten

# Where torch's fake kernels differ from the real ones: the argument whose memory format the results have, or None if
# the results are always contiguous (`tests/ops/test_strides.py` compares all of them).
FORMAT_OF: dict[_torch.Operator, int | None] = {
    aten._log_softmax_backward_data.default: None,
    aten.huber_loss_backward.default: None,
    aten.log_sigmoid_forward.default: None,
    aten.max_unpool2d.default: 0,
    aten.mse_loss_backward.default: None,
    aten.native_batch_norm.default: 0,
    aten.nll_loss2d_forward.default: None,
    aten.normal.Tensor_Tensor: None,
    aten.reflection_pad2d_backward.default: 1,
    aten.reflection_pad3d.default: 0,
    aten.reflection_pad3d_backward.default: 1,
    aten.replication_pad2d_backward.default: 1,
    aten.replication_pad3d.default: 0,
    aten.replication_pad3d_backward.default: 1,
    aten.smooth_l1_loss_backward.default: None,
}


def _dtypes(operator: _torch.Operator, args: tuple[Any, ...]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the first results where torch's fake kernel is wrong about them.

    On CPUs the statistics of a layer norm have the dtype of its parameters, which may be wider than the input's.
    """
    if operator != aten.native_layer_norm.default or args[0].device.type != "cpu":
        return ()
    input, _, weight, bias, *_ = args
    statistics = next((one.dtype for one in (weight, bias) if one is not None), input.dtype)
    return input.dtype, statistics, statistics


_table = PlanTable()


def as_on_one_device(handler: _torch.Handler) -> _torch.Handler:
    """Wrap a rule so that its results get the strides that one device would give them."""

    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handler(operator, args, kwargs)
        strides = strides_of(operator, args, kwargs)
        several = isinstance(result, list | tuple)
        results = result if several else (result,)
        if not strides or all(map(_has, results, strides)):
            return result
        view = operator._schema._is_view_op() and _torch.shares_memory(results[0], args[0])
        pairs = zip(results, strides, strict=True)
        found = [one if stride is None or _has(one, stride) else restrided(one, stride, view) for one, stride in pairs]
        changed = type(result)(found) if several else found[0]
        return _torch.as_view(operator, args, kwargs, changed) if view else changed

    return run


def _has(result: Any, stride: Stride | None) -> bool:
    return stride is None or not isinstance(result, DTensor) or result.stride() == stride


def restrided(tensor: DTensor, stride: Stride, view: bool = False) -> DTensor:
    """Return the same tensor with these strides: a copy unless the local tensor has their order, or it is a `view`."""
    layout = replace(Layout.of(_torch.spec_of(tensor)), stride=stride)
    local = _torch.local_of(tensor)
    result = _torch.wrap(local if view else layout.laid(local), layout.spec)
    copy_notes.hand_on(tensor, result)
    return result


# Their values do not affect a result's strides, and some change from step to step.
_ANY = (float, complex, torch.Generator)
_NUMBERS = frozenset((int, bool, type(None)))


def _key(operator: _torch.Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return the key of what strides depend on."""
    key = [value if type(value) in _NUMBERS else _part_of_key(value) for value in args]
    if kwargs:
        key += [(name, _part_of_key(value)) for name, value in kwargs.items()]
    return (operator, *key)


def _part_of_key(value: Any) -> Any:
    kind = type(value)
    if kind is list or kind is tuple:
        return tuple([one if type(one) in _NUMBERS else _part_of_key(one) for one in value])
    if isinstance(value, DTensor):
        return _torch.spec_of(value)
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if kind is torch.SymInt:
        return _torch.known(value)
    return kind if isinstance(value, _ANY) else value


def strides_of(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Stride | None, ...]:
    """Return each result's strides on one device, None for non-tensors; empty if they depend on values."""
    return _table.look_up(_key(operator, args, kwargs), lambda: _find(operator, args, kwargs))


def _find(operator: _torch.Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Stride | None, ...]:
    return tuple(None if one is None else one.stride for one in _described(operator, args, _torch.on_one_device(
        operator, args, kwargs)))  # fmt: skip


class OneDevice(NamedTuple):
    """Shape, strides and dtype of an operator's result on one device."""

    shape: tuple[int, ...]
    stride: Stride
    dtype: torch.dtype


def results_of(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    otherwise: Callable[[], Sequence[Layout]] | None = None,
) -> tuple[OneDevice | None, ...]:  # fmt: skip
    """Return what one device returns for these arguments, None for results that are no tensors.

    For arguments that one device does not take, `otherwise` gives the layouts of the results; without it torch raises.
    """
    if otherwise is None:
        return _described(operator, args, _torch.checked_on_one_device(operator, args, kwargs))
    made = _described(operator, args, _torch.on_one_device(operator, args, kwargs))
    return made or tuple(OneDevice(layout.shape, layout.stride, layout.dtype) for layout in otherwise())


def _described(operator: _torch.Operator, args: tuple[Any, ...], made: Any) -> tuple[OneDevice | None, ...]:
    results = made if isinstance(made, list | tuple) else () if made is None else (made,)
    given = FORMAT_OF.get(operator)
    known = torch.contiguous_format if given is None else _torch.suggested_format(args[given])
    dims = len(args[given or 0].shape) if operator in FORMAT_OF else None

    def described(one: Any, dtype: torch.dtype | None) -> OneDevice | None:
        if not isinstance(one, torch.Tensor):
            return None
        shape, stride = tuple(one.shape), tuple(one.stride())
        if dims is not None:
            stride = dense_stride(shape, known if one.dim() == dims else torch.contiguous_format)
        return OneDevice(shape, stride, dtype or one.dtype)

    return tuple(starmap(described, zip_longest(results, _dtypes(operator, args) if results else ())))
