"""Registering the batching rules in place of torch's own, and removing them."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..kernels import memory
from . import rules
from .products import OddError

RULES: dict[str, Callable[..., object]] = {
    "convolution": rules.convolution,
    "convolution_backward": rules.convolution_backward,
    "embedding": rules.with_indices_of_its_own,
    "one_hot": rules.with_indices_of_its_own,
}

_lock = threading.Lock()
_library: torch.library.Library | None = None


def install() -> None:
    """Let `torch.func.vmap` over convolutions use the rules of this package. Does nothing if it does so already."""
    global _library
    with _lock:
        if _library is not None:
            return
        library = torch.library.Library("aten", "IMPL")
        try:
            # torch warns that its own kernel is replaced, which is the very purpose.
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                for name, rule in RULES.items():
                    stock: Any = torch.library.get_kernel(f"aten::{name}", "FuncTorchBatched")
                    library.impl(name, _unless_odd(rule, stock.call_boxed), "FuncTorchBatched", with_keyset=True)
        except BaseException:
            library._destroy()
            raise
        _library = library
        memory.teach_c_library()


def uninstall() -> None:
    """Restore torch's own rules, and free the memory that is kept for results."""
    global _library
    with _lock:
        if _library is not None:
            _library._destroy()
            _library = None
            memory.shelf.clear()


def installed() -> bool:
    return _library is not None


def _unless_odd(rule: Callable[..., object], stock: Callable[..., object]) -> Callable[..., object]:
    def run(keys: Any, *args: Any) -> object:
        try:
            return rule(stock, keys, *args)
        except OddError:
            return stock(keys, *args)

    return run
