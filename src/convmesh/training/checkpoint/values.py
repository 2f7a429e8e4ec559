"""Plain values as JSON, restored exactly. Tensors are stored separately and referred to by name."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import CheckpointError

_DIRECT = (type(None), bool, int, str)
# Types that JSON lacks: the type, its encoder, its decoder.
_TAGGED: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),  # those that are not finite
    "complex": (complex, repr, complex),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "tuple": (tuple, list, tuple),
    "set": (set, list, set),
    "frozenset": (frozenset, list, frozenset),
    "size": (torch.Size, list, torch.Size),
    "device": (torch.device, str, torch.device),
    "dtype": (torch.dtype, lambda dtype: dtype_name(dtype), lambda name: dtype_called(name)),
}
_DICTS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}


def encode(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encode a value for JSON. Its tensors are added to `tensors`, under names that begin with `name`."""
    kind = type(value)
    if kind in _DIRECT or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, torch.Tensor):
        return {"tensor": _store_tensor(value, name, tensors)}
    for tag, make in _DICTS.items():
        if kind is make:
            return {tag: [[encode(k, f"{name} (key)", tensors), encode(v, _key_below(name, k), tensors)]
                          for k, v in value.items()]}  # fmt: skip
    for tag, (of, write, _) in _TAGGED.items():
        if kind is of:
            return {tag: encode(write(value), name, tensors)}
    raise CheckpointError(
        f"save_checkpoint: {name} is a {kind.__module__}.{kind.__qualname__}, which is not saved\n"
        "  remedy: give numbers, strings, tensors, and lists, tuples, sets and dicts of them; of an object its "
        "state_dict(), of a numpy array torch.from_numpy(array), of a numpy number number.item()"
    )


def decode(data: Any, tensors: Mapping[str, Any]) -> Any:
    """Restore a value that `encode` has encoded, with `tensors` by name."""
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    ((tag, inner),) = data.items()
    if tag == "tensor":
        return tensors[inner]
    if tag in _DICTS:
        return _DICTS[tag]({decode(key, tensors): decode(value, tensors) for key, value in inner})
    return _TAGGED[tag][2](decode(inner, tensors))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_called(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"load_checkpoint: this torch has no dtype {name!r}\n  remedy: a newer torch")
    return found


def _key_below(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def _store_tensor(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    """Store a tensor under a unique name: `a/b` may be the key `b` of `a`, or the key `a/b`."""
    unique, number = name, 1
    while unique in tensors:
        unique, number = f"{name}#{number}", number + 1
    tensors[unique] = tensor
    return unique
