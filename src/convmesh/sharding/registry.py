"""The registry of rules: what each operator does on DTensors, and what users can expect of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from .. import _torch
from .._torch import Handler, Operator
from . import view_writeback
from .implicit_replication import with_constants
from .result_strides import as_on_one_device


@dataclass(frozen=True)
class Behaviour:
    """What users can expect of an operator: a row of the operator table in the documentation."""

    stays: str  # which dimensions may be sharded, and stay sharded in the result
    communication: str  # what is sent: nothing, halo, all-reduce of C numbers, ...
    refused: str = "-"
    family: str = ""  # the folder of the rule


rules: dict[Operator, Handler] = {}
_behaviour: dict[Operator, Behaviour] = {}
composites: dict[str, Callable[..., object]] = {}

Switch = Callable[[], Callable[[], None]]
"""Begins something that is in force while the rules are, and returns what ends it."""
switches: list[Switch] = []

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
            rules[operator] = run if quick is None else _quicker(run, quick)
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
        rules[operator] = handler
        return handler

    return declare


def declared() -> dict[Operator, Behaviour]:
    """Return all operators that have a rule of their own."""
    return dict(_behaviour)


def made_of_others(*operators: Operator) -> None:
    """Declare operators that reach DTensor undecomposed only in inference mode: there they are decomposed too."""
    for operator in operators:
        rules[operator] = decompose


def decompose(operator: Operator, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
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

        composites[name] = above_autograd
        if behaviour is not None:
            rule(operator, behaviour=behaviour)(in_inference_mode)
        return function

    return declare


def while_installed(start: Callable[[], Callable[[], None]]) -> None:
    """Declare something else that is in force while the rules are: `start` begins it and returns what ends it."""
    switches.append(start)
