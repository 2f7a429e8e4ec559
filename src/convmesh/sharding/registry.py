"""The registry of rules, and installing them into DTensor and removing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from .._torch import Handler, Operator
from ..comm import keep_watch
from . import copy_notes, view_writeback
from .fallback import by_torch, in_place, into_out, without_rule
from .implicit_replication import with_constants
from .result_strides import as_on_one_device


@dataclass(frozen=True)
class Behaviour:
    """What users can expect of an operator: a row of the operator table in the documentation."""

    stays: str  # which dimensions may be sharded, and stay sharded in the result
    communication: str  # what is sent: nothing, halo, all-reduce of C numbers, ...
    refused: str = "-"
    family: str = ""  # the folder of the rule


_rules: dict[Operator, Handler] = {}
_behaviour: dict[Operator, Behaviour] = {}
_composites: dict[str, Callable[..., object]] = {}
_guards: dict[Operator, Handler] = {}
_replaced: dict[Operator, Handler | None] = {}
_switches: list[Callable[[], Callable[[], None]]] = [
    keep_watch, _torch.guard_what_rules_know, _torch.give_zeros_memory,
    lambda: _torch.mark_returned_copies(copy_notes.is_copy, _compiled_copy),
    lambda: _torch.before_compiled_writes(view_writeback.check_compiled_write),
]  # fmt: skip
_undo: list[Callable[[], None]] = []
_library: torch.library.Library | None = None

AnyHandler = TypeVar("AnyHandler", bound=Handler)
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., object])


def tolerant(handler: Handler) -> Handler:
    """Wrap a rule: take plain tensors as constants where allowed, and specialise symbolic sizes where needed."""
    return with_constants(_torch.settles_symbols(_torch.keeps_communication(handler)))


def rule(
    *operators: Operator,
    behaviour: Behaviour,
    knows_strides: bool = False,
    tolerates: bool = False,
    quick: Handler | None = None,
) -> Callable[[AnyHandler], AnyHandler]:
    """Declare how `operators` run on DTensors, and what users can expect of them.

    Results get the strides of one device, unless the rule `knows_strides` and sets them itself. It is wrapped with
    `tolerant`, unless it `tolerates` already. `quick` is called first, on every call, and may return None.
    """

    def declare(handler: AnyHandler) -> AnyHandler:
        plain = handler if tolerates else tolerant(handler)
        strided = plain if knows_strides else as_on_one_device(plain)
        for operator in operators:
            assert operator not in _behaviour, f"{operator} has a rule already"
            mutable = operator._schema.is_mutable
            new = any(result.alias_info is None for result in operator._schema.returns)
            run = strided if new or not mutable else plain
            run = _torch.view_rule(run) if operator._schema._is_view_op() else run
            run = view_writeback.tracked(operator, run) if mutable else run
            _rules[operator] = run if quick is None else _quicker(run, quick)
            _behaviour[operator] = replace(behaviour, family=handler.__module__.split(".")[-2])
        return handler

    return declare


def _quicker(handler: Handler, quick: Handler) -> Handler:
    @wraps(handler)
    def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = quick(operator, args, kwargs)
        return handler(operator, args, kwargs) if made is None else made

    return run


def unlisted(operator: Operator) -> Callable[[AnyHandler], AnyHandler]:
    """Declare a rule for an operator that users do not call, and that is in no table."""

    def declare(handler: AnyHandler) -> AnyHandler:
        _rules[operator] = handler
        return handler

    return declare


def declared() -> dict[Operator, Behaviour]:
    """Return all operators that have a rule of their own."""
    return dict(_behaviour)


def made_of_others(*operators: Operator) -> None:
    """Declare operators that reach DTensor undecomposed only in inference mode: there they are decomposed too."""
    for operator in operators:
        _rules[operator] = _decompose


def _decompose(operator: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return _torch.composite(operator, args, kwargs)


def keep_whole(*operators: Operator, made_of: Handler | None = None) -> None:
    """Declare operators that torch's compiler must not decompose into indexing before their rule is asked.

    `made_of` decomposes them instead, unless the rule does that itself.
    """
    for operator in operators:
        while_installed(partial(_torch.keep_whole, operator, made_of))


def composite(name: str, behaviour: Behaviour | None = None) -> Callable[[AnyFunction], AnyFunction]:
    """Declare the decomposition of the differentiable operator `name`, above autograd, if any argument is a DTensor.

    With a `behaviour` it also applies in inference mode, where the operator reaches DTensor undecomposed.
    """
    packet, _, overload = name.partition(".")
    operator: Operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def declare(function: AnyFunction) -> AnyFunction:
        @wraps(function)
        def above_autograd(*args: Any, **kwargs: Any) -> Any:
            for argument in args:
                if isinstance(argument, DTensor):
                    return function(*args, **kwargs)
            return _torch.composite(operator, args, kwargs)

        @wraps(function)
        def in_inference_mode(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return function(*args, **kwargs)

        _composites[name] = above_autograd
        if behaviour is not None:
            rule(operator, behaviour=behaviour)(in_inference_mode)
        return function

    return declare


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
    return view_writeback.tracked(operator, _decompose if _torch.is_composite(operator) else _torch.stock)


def while_installed(start: Callable[[], Callable[[], None]]) -> None:
    """Declare something else that is in force while the rules are: `start` begins it and returns what ends it."""
    _switches.append(start)


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
        for name, function in _composites.items():
            for key in _torch.autograd_keys(name):
                library.impl(name, function, key)
    except Exception:
        library._destroy()
        raise
    table = _torch.handlers()
    for operator in _torch.out_operators():
        if operator not in table:
            _rules.setdefault(operator, into_out)
    made_of_others(*(operator for operator in _torch.composite_operators() if operator not in _rules | table))
    for operator in _torch.view_operators():
        if operator not in _rules and operator not in table:
            _rules[operator] = _torch.view_rule(_torch.stock)
    for operator in _torch.values_alone():
        known, functional = _torch.has_strategy(operator), _torch.functional_of(operator)
        ours = functional is not None and functional in _rules and not functional._schema._is_view_op()
        if operator in _rules or operator in table or (known and not ours and not _torch.takes_several(operator)):
            continue
        handler = in_place if ours else by_torch if known else without_rule
        _rules[operator] = view_writeback.tracked(operator, handler) if operator._schema.is_mutable else handler
    for function in (*_rules.values(), *_composites.values()):
        _torch.never_alone(function)  # torch.compile would compile them when it gives up a frame
    _replaced.update({operator: table.get(operator) for operator in _rules})
    table.update(_rules)
    _undo.extend(start() for start in _switches)
    _library = library


def observe(observer: Callable[[Operator, tuple[Any, ...], dict[str, Any]], None]) -> Callable[[], None]:
    """Have `observer` called before each rule that is now in force; return a function that stops it."""

    def observed(handler: Handler) -> Handler:
        def run(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            observer(operator, args, kwargs)
            return handler(operator, args, kwargs)

        return run

    table = _torch.handlers()
    mine = {operator: observed(rule) for operator, rule in _rules.items() if table.get(operator) is rule}
    table.update(mine)

    def end() -> None:
        table.update({operator: _rules[operator] for operator, rule in mine.items() if table.get(operator) is rule})

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
        if table.get(operator) is not _rules[operator]:
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
