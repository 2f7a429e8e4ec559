"""Symbolic sizes while torch.compile traces: kept where a rule supports them, specialised to numbers elsewhere.

What a rule asks of a symbol (is it even, is it larger than some number) becomes a guard of the compiled code on global
sizes, so that all ranks recompile for the same sizes.
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
    """Return a symbolic size with a known value as a number; anything else unchanged."""
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
    """Return a key in which symbols are replaced by their names."""
    if isinstance(value, tuple):
        return tuple(map(named, value))
    return str(value) if isinstance(value, torch.SymInt) else value


@contextmanager
def meta_tensors(symbolic: bool) -> Iterator[None]:
    """Context manager for making meta tensors, also while torch.compile traces, and also with symbolic sizes."""
    mode = detect_fake_mode() if symbolic else None
    with no_modes():
        if mode is None:
            yield
        else:
            with mode:
                yield


def settle(*values: torch.Tensor | torch.SymInt) -> None:
    """Specialise symbols, also in sizes, to numbers: the compiled code holds for these alone; others recompile."""
    for value in values:
        for size in (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt):  # an expression is a number only if all that it is made of are
                for symbol in sorted(size.node.expr.free_symbols, key=str):
                    size.node.shape_env.evaluate_expr(symbol)


class SymbolsUnfitError(TypeError):
    """Raised by a rule that needs numbers where it got symbols: these are specialised, and it runs again."""


def need_numbers(*sizes: Any) -> None:
    if has_symbols(tuple(map(known, sizes))):
        raise SymbolsUnfitError("these sizes have to be numbers")


def settles_symbols(handler: Handler) -> Handler:
    """Wrap a rule so that symbols are specialised to numbers if it fails with them.

    Some of torch's kernels need numbers, and so does what is cached by sizes.
    """

    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _bind_symbols((args, kwargs))
        try:
            return handler(operator, args, kwargs)
        except (TypeError, RuntimeError):
            # Also those whose values are known by now: what the rule had derived of them before may still be symbols.
            symbolic = [leaf for leaf in tree_iter((args, kwargs)) if has_symbols(_sizes(leaf))]
            if not symbolic:
                raise
        settle(*symbolic)
        return handler(operator, args, kwargs)

    return run


def _bind_symbols(arguments: Any) -> None:
    """Make the symbols of global sizes known to the traced graph under their own proxies.

    They are no graph inputs; the tracer finds a symbol by name, as the last value with that name. After a sum with 0
    that value is the sum itself, which would then be defined by itself.
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
    """Whether any argument of an operator is a symbol without a known value, or has such sizes."""
    return any(has_symbols(tuple(map(known, _sizes(leaf)))) for leaf in tree_iter(arguments))


def _sizes(value: Any) -> tuple[Any, ...]:
    return (*value.shape, *value.stride()) if isinstance(value, DTensor) else (value,)
