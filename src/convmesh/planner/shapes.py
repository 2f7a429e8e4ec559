"""Results of operators on tensors without values, remembered: torch works them out in Python, which takes most of the
time of a dry run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import torch

from .. import _torch

aten = torch.ops.aten
_MOST = 100_000


class _Made(NamedTuple):
    """A tensor that has a storage of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_torch.DEVICE)


# Results of operators that have no kernel for tensors without values, or one that makes another tensor: who waits for a
# collective gets the tensor that he waits for, and no copy beside it.
_RESULTS: dict[Any, Callable[..., Any]] = {
    aten.batch_norm_update_stats.default: lambda x, *_: tuple(x.new_empty(x.shape[1], dtype=_wide(x)) for _ in "mv"),
    # Without the gradient of the input, where nobody asks for it.
    aten.native_batch_norm_backward.default: lambda *args: tuple(
        one if wanted else None
        for one, wanted in zip(_remembered(aten.native_batch_norm_backward.default, args, {}), args[-1], strict=True)
    ),
    torch.ops._c10d_functional.wait_tensor.default: lambda x: x,
}
_known: dict[Hashable, _Made | tuple[_Made, ...] | None] = {}


def result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what an operator does on tensors without values."""
    return _RESULTS[func](*args) if func in _RESULTS else _remembered(func, args, kwargs)


def _remembered(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator once for each combination of shapes; each time, if it writes or returns views."""
    if not _makes_new(func):
        return func(*args, **kwargs)
    try:
        key = func, _key(args), _key(tuple(kwargs.items()))
        known = _known.get(key)
    except TypeError:  # of arguments that cannot be told apart, such as generators of random numbers
        return func(*args, **kwargs)
    if known is not None:
        return known.again() if isinstance(known, _Made) else tuple(one.again() for one in known)
    made = func(*args, **kwargs)
    if len(_known) < _MOST:
        _known[key] = _told(made, (*args, *kwargs.values()))
    return made


@cache
def _makes_new(func: Any) -> bool:
    return func.namespace == "aten" and not func._schema.is_mutable and not _torch.is_view_operator(func)


def _key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            raise TypeError
        return tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return type(value), value  # 1, 1.0 and True are equal, and make different results


def _told(made: Any, given: tuple[Any, ...]) -> _Made | tuple[_Made, ...] | None:
    """Return what to make again, or None of anything but new tensors."""
    several = made if isinstance(made, tuple) else (made,)
    if not all(isinstance(one, torch.Tensor) and one.is_meta for one in several):
        return None
    told = tuple(_Made(tuple(one.shape), one.stride(), one.dtype) for one in several)
    memories = [_torch.memory_of(one) for one in (*several, *given) if isinstance(one, torch.Tensor)]
    sizes = [(one.untyped_storage().nbytes(), like.again().untyped_storage().nbytes())
             for one, like in zip(several, told, strict=True)]  # fmt: skip
    if len(set(memories)) < len(memories) or any(size != again for size, again in sizes):
        return None
    return told if isinstance(made, tuple) else told[0]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
