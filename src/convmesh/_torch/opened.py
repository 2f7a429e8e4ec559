"""Arguments of a call taken apart: the key by which its plan is found, and the local tensors that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..strides import usual
from .symbols import known
from .tensors import spec_of

_DTENSORS, _PLAIN = {DTensor}, {torch.Tensor}
_COUNTS, _NUMBERS = {int, bool}, {int, bool, float, NoneType}
_shared: dict[tuple[int, DTensorSpec], DTensorSpec] = {}


def opened(
    args: Sequence[Any], numbers: bool = True
) -> tuple[list[Any], list[Any], list[Any], DeviceMesh | None] | None:
    """Of the arguments of a call: the key by which its plan is found, which has a spec for each tensor, and `numbers`
    or None for them; the arguments with local tensors, as they are; the shapes of these; and the mesh of the last one.

    None for calls that need a closer look: while tracing, where a collective is under way, beside plain tensors.
    """
    key: list[Any] = []
    values: list[Any] = []
    shapes: list[Any] = []
    mesh = None
    for argument in args:
        kind = type(argument)
        if kind is DTensor:
            local = argument._local_tensor
            if type(local) is not torch.Tensor:
                return None
            spec = argument._spec
            mesh = spec.mesh
            key.append(spec)
            values.append(local)
            shapes.append(local.shape)
        elif kind in _NUMBERS:
            key.append(argument if numbers else None)
            values.append(argument)
        elif kind is list and argument and type(argument[0]) not in _COUNTS:
            inner = opened(argument)
            if inner is None:
                return None
            key.append(tuple(inner[0]))
            values.append(inner[1])
            shapes += inner[2]
            mesh = inner[3] or mesh
        elif isinstance(argument, torch.Tensor):
            return None
        else:
            key.append((tuple(argument) if kind is list else argument) if numbers else None)
            values.append(argument)
    return key, values, shapes, mesh


def share_specs(lists: Iterable[Iterable[Any]]) -> None:
    """Let DTensors that lie alike have one spec, which is found again without comparing."""
    for tensor in (tensor for tensors in lists for tensor in tensors):
        if type(tensor) is DTensor:
            tensor._spec = shared_spec(tensor._spec)


def shared_spec(spec: DTensorSpec) -> DTensorSpec:
    """The one of all specs that are equal to this one."""
    key = id(spec.mesh), spec
    try:
        shared = _shared.get(key)
    except TypeError:  # a compiler's symbols are no key
        return spec
    if shared is None or shared.mesh is not spec.mesh:  # which may be a mesh of another world, or another thread
        if len(_shared) >= 4096:
            _shared.clear()
        shared = _shared[key] = spec
    return shared


def opened_like(lists: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], list[list[DTensorSpec]]] | None:
    """The local tensors of lists of DTensors, as they are, and where the tensors are; numbers that are plain tensors
    stay what they are, and are nowhere. None for what needs a closer look."""
    opened: list[list[Any]] = []
    specs: list[list[DTensorSpec]] = []
    for tensors in lists:
        kinds = set(map(type, tensors))
        if kinds == _DTENSORS:
            opened.append([tensor._local_tensor for tensor in tensors])
            specs.append([tensor._spec for tensor in tensors])
            if set(map(type, opened[-1])) != _PLAIN:
                return None
        elif kinds == _PLAIN and opened and {tensor.dim() for tensor in tensors} == {0}:
            opened.append(list(tensors))
            specs.append([])
        else:
            return None
    return opened, specs


def opened_lists(
    lists: Sequence[Sequence[Any]], fits: Callable[[DTensorSpec], bool]
) -> tuple[list[list[Any]], list[DTensorSpec]] | None:
    """The local tensors of lists of tensors, and where the tensors of each number are, which is the same in all lists
    and `fits`; numbers that are plain tensors stand beside them.

    None for what needs a closer look. An optimizer has hundreds of tensors, so this does nothing twice.
    """
    specs: list[DTensorSpec] = []
    opened: list[list[Any]] = []
    for tensors in lists:
        opened.append([])
        first, add = not specs, opened[-1].append
        for number, tensor in enumerate(tensors):
            if type(tensor) is not DTensor:
                if first or type(tensor) is not torch.Tensor or tensor.dim():
                    return None
                add(tensor)
                continue
            local, spec = tensor._local_tensor, tensor._spec
            if type(local) is not torch.Tensor:
                return None
            if first:
                same = specs and spec.placements == specs[-1].placements and spec.shard_order == specs[-1].shard_order
                if not same and not fits(spec):
                    return None
                specs.append(spec)
            elif spec is not specs[number]:
                other = specs[number]
                if spec.placements != other.placements or spec.shape != other.shape or spec.mesh is not other.mesh:
                    return None
                if spec.shard_order != other.shard_order:
                    return None
            shape = local.shape
            add(usual(local, spec.tensor_meta.stride) if 1 in shape or 0 in shape else local)  # type: ignore[union-attr]
    return opened, specs


def key_of(value: Any) -> Any:
    """What `opened` has in a key, of calls that need a closer look: symbols of a compiler by the numbers they are."""
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    return spec_of(value) if isinstance(value, DTensor) else known(value)
