"""View operators that, where no sharded dimension is touched, every rank runs on its own local tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _torch
from .layout import Layout
from .plan_cache import Table
from .plan_rule import Quick


class _Otherwise:
    """A call that is no view of local tensors."""

    mesh = None


def local_views(where: Callable[..., Layout | None]) -> Quick:
    """Views of local tensors, where `where` knows them: a known call is one look-up of few parts.

    Of the operator, the tensor's layout and the numbers of a call `where` says once where the result is if every rank
    calls the operator on its local tensor, with the strides of one device; None where it does not.
    """
    plans = Table()
    known = plans.plans

    def planned(operator: _torch.Operator, spec: _torch.Spec, key: tuple[Any, ...]) -> Layout | _Otherwise:
        def make() -> Layout | _Otherwise:
            here = _torch.plain_order(spec) and spec.mesh.get_coordinate() is not None
            return (where(operator, Layout.of(spec), *key[2:]) if here else None) or _Otherwise()

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
