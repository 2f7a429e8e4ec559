"""Sizes that are symbols while torch.compile traces: kept where a rule can do with them, settled where it cannot.

What a rule asks of a symbol (is it even, is it larger than that) becomes a guard of the compiled code, on global sizes,
so that all ranks compile anew for the same sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot
from torch.utils._pytree import tree_iter

from .names import Handler, Operator
from .tracing import no_modes, proxy_mode


def known(size: Any) -> Any:
    """A size that is settled as a number; others as they are."""
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if number is None else number


def has_symbols(value: Any) -> bool:
    if isinstance(value, DTensorSpec):
        meta = value.tensor_meta
        return meta is not None and has_symbols((tuple(meta.shape), tuple(meta.stride)))
    if is_dataclass(value):
        return any(has_symbols(getattr(value, field.name)) for field in fields(value))
    return isinstance(value, torch.SymInt) or (isinstance(value, tuple | list) and any(map(has_symbols, value)))


def named(value: Any) -> Any:
    """With symbols by their names: a key."""
    if isinstance(value, tuple):
        return tuple(map(named, value))
    return str(value) if isinstance(value, torch.SymInt) else value


@contextmanager
def meta_tensors(symbolic: bool) -> Iterator[None]:
    """For meta tensors of one's own, also while torch.compile traces, and also of symbolic sizes."""
    mode = detect_fake_mode() if symbolic else None
    with no_modes():
        if mode is None:
            yield
        else:
            with mode:
                yield


def settle(*values: torch.Tensor | torch.SymInt) -> None:
    """Make numbers of symbols, also in sizes: the compiled code holds for these alone, and another compiles anew."""
    for value in values:
        for number in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            int(number)


def settles_symbols(handler: Handler) -> Handler:
    """A rule that gets numbers where it cannot do with symbols: the compiled code then holds for these alone.

    Some of torch's kernels want numbers, and what is kept by sizes wants them too.
    """

    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _bind_symbols((args, kwargs))
        try:
            return handler(operator, args, kwargs)
        except (TypeError, RuntimeError):
            symbolic = [leaf for leaf in tree_iter((args, kwargs)) if has_symbols_within(leaf)]
            if not symbolic:
                raise
        settle(*symbolic)
        return handler(operator, args, kwargs)

    return run


def _bind_symbols(arguments: Any) -> None:
    """Let the graph that is traced know the symbols of global sizes by themselves.

    It is not given them, and finds them by their names: by the last number that had the name. After a sum with 0 that
    is the sum itself, which would then be made of itself.
    """
    mode = proxy_mode()
    if mode is None:
        return
    for leaf in tree_iter(arguments):
        if not isinstance(leaf, DTensor):
            continue
        meta = leaf._spec.tensor_meta
        for size in (*leaf.shape, *(() if meta is None else meta.shape)):
            if isinstance(size, torch.SymInt) and (proxy := get_proxy_slot(size, mode.tracer, None)) is not None:
                set_proxy_slot(size, mode.tracer, proxy)


def has_symbols_within(arguments: Any) -> bool:
    """Whether arguments of an operator are symbols, or have symbolic sizes."""
    return any(has_symbols(known(leaf)) or _is_symbolic(leaf) for leaf in tree_iter(arguments))


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, DTensor) and has_symbols((*map(known, value.shape), *map(known, value.stride())))
