"""Rules with a local call or an exchange of their own: a planner, and what it says is run on local tensors.

The author of such a rule writes the planner. It gets layouts and numbers, no tensors, and is called once for each
combination of them: a call that was seen before is one look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from functools import wraps
from typing import Any, TypeVar

from torch.distributed.tensor import DTensor

from .. import _torch
from .call import Call, Prepared
from .errors import Unfit, refuse
from .plan_cache import PlanTable
from .redistribute import layouts_of, specs_of
from .registry import Behaviour, rule, tolerant
from .result_strides import as_on_one_device, strides_of

Made = Callable[..., Any]
"""Of the arguments of a call as they are, what an operator is for them that is made of others."""


class Left:
    """A call that is left to torch's DTensor, or to other operators."""

    mesh = None  # none of these ways knows anything of one

    def __init__(self, run: _torch.Handler):
        self.run = run

    @staticmethod
    def to(made: Made) -> Left:
        return Left(as_on_one_device(lambda operator, args, kwargs: made(*_torch.arguments(operator, args, kwargs))))


Quick = Callable[[_torch.Operator, tuple[Any, ...], dict[str, Any]], Any]
"""Of a call what it gives; None for calls that need a closer look, which it has to know of inference mode, too."""
Make = Callable[[_torch.Operator, tuple[Any, ...], list[Any]], Prepared | Left]
"""Of an operator, the arguments of a call, and the same with layouts in place of tensors."""
AnyPlanner = TypeVar("AnyPlanner", bound=Callable[..., Call | Made | None])


def plan_rule(
    *operators: _torch.Operator,
    behaviour: Behaviour,
    remembers: bool = False,
    asks: Callable[..., Hashable] | None = None,
    adapt: Callable[..., tuple[Any, ...]] | None = None,
    completes: Callable[..., tuple[Any, ...]] | None = None,
    varies: Container[str] = (),
    foreign: bool = False,
    quick: Quick | None = None,
    strided: bool = False,
) -> Callable[[AnyPlanner], AnyPlanner]:
    """Declare that `operators` run as a planner says, and what their users can expect.

    The planner gets the operator and all arguments of a call, a `Layout` for each tensor and tuples for lists, and
    returns a `Call`; a function of the arguments as they are where the operator is made of others; None leaves the call
    to torch's DTensor. What it cannot run it refuses with `Unfit`. With `foreign`, tensors that are sharded in another
    order than the mesh's, which no planner gets, are left to torch's DTensor as well.

    With `remembers`, the gradient of the first tensor is written into zeros of its shape, and goes where it was. What
    a plan depends on beside the arguments `asks` finds out, of specs and numbers: the planner gets it as one more.
    Numbers that change from call to call, and on which no plan depends, have a name in `varies`: it gets None for them.
    `adapt` gets the arguments of each call, as they are, and returns those that are planned for; `completes` does so
    where not all of its tensors are DTensors, and leaves others as they are. `quick` is asked first, on every call: for
    what takes less than looking up a plan. With `strided` the planner gets the strides of one device's results as well.
    """

    def declare(planner: AnyPlanner) -> AnyPlanner:
        def make(operator: _torch.Operator, args: tuple[Any, ...], given: list[Any]) -> Prepared | Left:
            known = _torch.signature(operator)
            strides = strides_of(operator, *_torch.by_name(operator, args)) if strided else None
            call = planner(operator, *given) if strides is None else planner(operator, *given, strides)
            if not isinstance(call, Call):
                return Left(_torch.stock) if call is None else Left.to(call)
            if strides is None:
                own = call.view or call.writes
                strides = () if own else strides_of(operator, *_torch.by_name(operator, args))
            return Prepared(operator, [given[number] for number in known.places], call, strides, remembers)

        prepared_rule(
            *operators, behaviour=behaviour, make=make, written=planner, asks=asks, varies=varies, adapt=adapt,
            completes=completes, foreign=foreign, quick=quick,
        )  # fmt: skip
        return planner

    return declare


def prepared_rule(
    *operators: _torch.Operator, behaviour: Behaviour, make: Make, written: Callable[..., Any],
    asks: Callable[..., Hashable] | None = None, varies: Container[str] = (),
    adapt: Callable[..., tuple[Any, ...]] | None = None, completes: Callable[..., tuple[Any, ...]] | None = None,
    foreign: bool = False, quick: Quick | None = None,
) -> None:  # fmt: skip
    """Declare rules whose calls are prepared once; `written` is what the author of the rule has written."""
    for operator in operators:
        handler = _handler(operator, make, written, asks, varies, completes, foreign)
        handler = handler if adapt is None else _adapted(handler, adapt)
        rule(operator, behaviour=behaviour, knows_strides=True, tolerates=True, quick=quick)(handler)


def _adapted(handler: _torch.Handler, adapt: Callable[..., tuple[Any, ...]]) -> _torch.Handler:
    @wraps(handler)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return handler(operator, adapt(*_torch.arguments(operator, args, kwargs)), {})

    return run


def _handler(
    operator: _torch.Operator, make: Make, written: Callable[..., Any], asks: Callable[..., Hashable] | None,
    varies: Container[str], completes: Callable[..., tuple[Any, ...]] | None, foreign: bool,
) -> _torch.Handler:  # fmt: skip
    plans, names = PlanTable(), _torch.signature(operator).names
    known, count = plans.plans, len(names)
    varying = [number for number, name in enumerate(names) if name in varies]

    @wraps(written)
    def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        opened = _torch.opened(args if len(args) == count else _torch.arguments(operator, args, kwargs))
        if opened is not None:
            key, values, shapes, mesh = opened
            for number in varying:
                key[number] = None
            if asks is not None:
                key.append(asks(*key))
            call = known.get(tuple(key))
            if call is not None:
                if call.mesh is mesh and call.shapes == shapes:
                    if call.odd:
                        call.make_usual(values)
                    return call(values, args, kwargs)
                if call.mesh is None:
                    return call.run(operator, args, kwargs)
        return unknown(operator, args, kwargs)

    @tolerant
    @wraps(written)
    def unknown(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = _torch.arguments(operator, args, kwargs)
        if completes is not None:
            given, kwargs = completes(*given), {}
            args = given
        named = _named(operator, given)
        specs_of(_torch.name_of(operator), named)  # refuses plain tensors
        key = [None if number in varying else _torch.key_of(value) for number, value in enumerate(given)]
        if asks is not None:
            key.append(asks(*key))

        def plan() -> Prepared | Left:
            if foreign and any(not _torch.plain_order(_torch.spec_of(tensor)) for _, tensor in named):
                return Left(_torch.stock)
            return make(operator, given, _with_layouts(operator, named, key))

        try:
            call = plans.look_up(tuple(key), plan)
        except Unfit as unfit:
            raise refuse(_torch.name_of(operator), unfit.reason, named, unfit.remedy) from None
        if isinstance(call, Left):
            return call.run(operator, args, kwargs)
        values = [_local(value) for value in given]
        call.check(values)
        return call(values, args, kwargs)

    return run


def _named(operator: _torch.Operator, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The tensors of a call, with the names that errors call them by."""
    known = _torch.signature(operator)
    found: list[tuple[str, Any]] = []
    for number in known.places:
        name, value = known.names[number], args[number]
        several = isinstance(value, list | tuple)
        found += [(f"{name}[{at}]", one) for at, one in enumerate(value)] if several else [(name, value)]
    return found


def _with_layouts(operator: _torch.Operator, named: Sequence[tuple[str, Any]], key: Sequence[Any]) -> list[Any]:
    """The arguments with layouts in place of specs: on one mesh, dimensions sharded in its own order."""
    known = _torch.signature(operator)
    specs = [key[number] for number in known.places]
    flat = [one for spec in specs for one in (spec if isinstance(spec, tuple) else (spec,))]
    named = [(name, spec) for (name, _), spec in zip(named, flat, strict=True)]
    layouts = iter(layouts_of(_torch.name_of(operator), named))
    given = list(key)
    for number, spec in zip(known.places, specs, strict=True):
        given[number] = tuple(next(layouts) for _ in spec) if isinstance(spec, tuple) else next(layouts)
    return given


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return _torch.local_of(value)
    return [_local(one) for one in value] if type(value) is list else value
