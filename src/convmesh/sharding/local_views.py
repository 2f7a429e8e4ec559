"""Rules of view operators that, where no sharded dimension is touched, every rank runs on its own local tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .. import _torch
from .layout import Layout
from .plan_cache import Table
from .registry import Behaviour, rule, tolerant
from .result_strides import as_on_one_device

AnyHandler = TypeVar("AnyHandler", bound=_torch.Handler)


class _Otherwise:
    """A call that is no view of local tensors."""

    mesh = None


def local_view_rule(
    *operators: _torch.Operator, behaviour: Behaviour, where: Callable[..., Layout | None]
) -> Callable[[AnyHandler], AnyHandler]:
    """Declare how view operators run on DTensors, and what their users can expect.

    Of the operator, the tensor's spec and the numbers of a call, as they are given, `where` says once where the result
    is if every rank calls the operator on its local tensor, with the strides of one device. A known call is one
    look-up. None leaves it to the decorated rule, as are all calls of a compiler.
    """

    def declare(handler: AnyHandler) -> AnyHandler:
        plans = Table()
        known, other = plans.plans, as_on_one_device(tolerant(handler))

        def planned(operator: _torch.Operator, spec: _torch.Spec, key: tuple[Any, ...]) -> Layout | _Otherwise:
            return plans.look_up(key, lambda: where(operator, spec, *key[2:]) or _Otherwise())

        @wraps(handler)
        def run(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            local = None if kwargs else _torch.plain_local_of(args[0])
            if local is None:
                return other(operator, args, kwargs)
            spec = _torch.eager_spec_of(args[0])
            numbers = args[1:] if type(args[-1]) is not list else (tuple(args[-1]),)
            key = (id(operator), spec, *numbers)
            try:
                output = known.get(key) or planned(operator, spec, key)
            except TypeError:  # symbols
                return other(operator, args, kwargs)
            if output.mesh is not spec.mesh:
                return other(operator, args, kwargs)
            return _torch.aliased(_torch.wrap(operator(local, *numbers), output.spec), args[0])

        rule(*operators, behaviour=behaviour, knows_strides=True, tolerates=True)(run)
        return handler

    return declare
