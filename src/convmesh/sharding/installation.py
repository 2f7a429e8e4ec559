"""Installing the rules into DTensor, and removing them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .. import _torch
from .._torch import Handler, Operator
from ..comm import keep_watch
from . import copy_notes, view_writeback
from .fallback import by_torch, in_place, into_out, without_rule
from .registry import Switch, composites, decompose, made_of_others, rules, switches

SWITCHES: tuple[Switch, ...] = (
    keep_watch, _torch.guard_what_rules_know, _torch.give_zeros_memory, _torch.drop_dead_communication,
    lambda: _torch.mark_returned_copies(copy_notes.is_copy, _compiled_copy),
    lambda: _torch.before_compiled_writes(view_writeback.check_compiled_write),
)  # fmt: skip

_guards: dict[Operator, Handler] = {}
_replaced: dict[Operator, Handler | None] = {}
_undo: list[Callable[[], None]] = []
_library: torch.library.Library | None = None


def installed() -> bool:
    return _library is not None


def install() -> None:
    """Install every rule. Does nothing if they are installed."""
    global _library
    if installed():
        return
    _torch.check_version()
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, function in composites.items():
            for key in _torch.autograd_keys(name):
                library.impl(name, function, key)
    except Exception:
        library._destroy()
        raise
    table = _torch.handlers()
    for operator in _torch.out_operators():
        if operator not in table:
            rules.setdefault(operator, into_out)
    made_of_others(*(operator for operator in _torch.composite_operators() if operator not in rules | table))
    for operator in _torch.view_operators():
        if operator not in rules and operator not in table:
            rules[operator] = _torch.view_rule(_torch.stock)
    for operator in _torch.values_alone():
        known, functional = _torch.has_strategy(operator), _torch.functional_of(operator)
        ours = functional is not None and functional in rules and not functional._schema._is_view_op()
        if operator in rules or operator in table or (known and not ours and not _torch.takes_several(operator)):
            continue
        handler = in_place if ours else by_torch if known else without_rule
        rules[operator] = view_writeback.tracked(operator, handler) if operator._schema.is_mutable else handler
    for function in (*rules.values(), *composites.values()):
        _torch.never_alone(function)  # torch.compile would compile them when it gives up a frame
    _replaced.update({operator: table.get(operator) for operator in rules})
    table.update(rules)
    _undo.extend(start() for start in (*SWITCHES, *switches))
    _library = library


def observe(observer: Callable[[Operator, tuple[Any, ...], dict[str, Any]], None]) -> Callable[[], None]:
    """Have `observer` called before each rule that is now in force; return a function that stops it."""

    def observed(handler: Handler) -> Handler:
        def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            observer(operator, args, kwargs)
            return handler(operator, args, kwargs)

        return run

    table = _torch.handlers()
    mine = {operator: observed(rule) for operator, rule in rules.items() if table.get(operator) is rule}
    table.update(mine)

    def end() -> None:
        table.update({operator: rules[operator] for operator, rule in mine.items() if table.get(operator) is rule})

    return end


def uninstall() -> None:
    """Restore what was there before `install`, except entries that were replaced by others since."""
    global _library
    if _library is None:
        return
    _library._destroy()
    _library = None
    while _undo:
        _undo.pop()()
    _torch.compile_for_any_rank()
    view_writeback.stop_watching_reads()
    table = _torch.handlers()
    for operator, before in _replaced.items():
        if table.get(operator) is not rules[operator]:
            continue
        if before is None:
            del table[operator]
        else:
            table[operator] = before
    _replaced.clear()
    for operator, guard in _guards.items():
        if table.get(operator) is guard:
            del table[operator]
    _guards.clear()


def guard_writes() -> None:
    """Track every operator that writes, also those without a rule, once there is a copy that torch takes for a view."""
    if _guards or not installed():
        return
    table = _torch.handlers()
    for operator in _torch.writing_operators():
        if operator not in table:
            _guards[operator] = table[operator] = _guarded(operator)


def _compiled_copy(local: torch.Tensor) -> None:
    """Note that compiled code has returned a copy that torch takes for a view."""
    copy_notes.mark_compiled(local)
    guard_writes()


@cache
def _guarded(operator: Operator) -> Handler:
    return view_writeback.tracked(operator, decompose if _torch.is_composite(operator) else _torch.stock)
