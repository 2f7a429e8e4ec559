"""View operators that every rank runs on its own local tensor, where no sharded dimension is affected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from .layout import Layout
from .plan_cache import PlanTable
from .plan_rule import Quick


class _NotALocalView:
    """A call that is not a view of local tensors."""

    mesh = None


def local_views(where: Callable[..., Layout | None]) -> Quick:
    """Return a fast path for views of local tensors: for a known call, a single look-up with a small key.

    `where(operator, layout, *arguments)` returns the layout of the result, with the strides of one device, if every
    rank can run the operator on its local tensor, else None. It is called once per combination.
    """
    plans = PlanTable()
    known = plans.plans

    def planned(operator: _torch.Operator, spec: _torch.Spec, key: tuple[Any, ...]) -> Layout | _NotALocalView:
        def make() -> Layout | _NotALocalView:
            here = _torch.plain_order(spec) and spec.mesh.get_coordinate() is not None
            return (where(operator, Layout.of(spec), *key[2:]) if here else None) or _NotALocalView()

        return plans.look_up(key, make)

    def view(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = None if kwargs else _torch.plain_local_of(args[0])
        if local is None or torch.is_inference_mode_enabled():
            return None
        spec = _torch.eager_spec_of(args[0])
        numbers = args[1:] if type(args[-1]) is not list else (tuple(args[-1]),)
        key = (id(operator), spec, *numbers)
        try:
            output = known.get(key) or planned(operator, spec, key)
        except TypeError:  # symbols
            return None
        if output.mesh is not spec.mesh:
            return None
        return _torch.aliased(_torch.wrap(operator(local, *numbers), output.spec), args[0])

    return view
