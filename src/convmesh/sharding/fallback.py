"""Operators without a rule, here or in torch: decomposed into others, or refused with a remedy.

torch itself runs some of them on local tensors, if their decomposition shows that no communication is needed, and
refuses the others. Here the decomposition is executed, and each of its operators follows its own rule. On replicated
tensors every operator works.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_iter, tree_map_only

from .. import _torch
from .errors import refuse
from .implicit_replication import as_replicated, with_constants
from .redistribute import check_placed, specs_of

aten = torch.ops.aten


@with_constants
def without_rule(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _torch.has_strategy(operator):  # one that was registered with DTensor since
        return _torch.stock(operator, args, kwargs)
    tensors: list[Any] = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    named = [(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)]
    check_placed(_torch.name_of(operator), named)
    if _torch.functional_of(operator) is not None:
        return in_place(operator, args, kwargs)
    if all(isinstance(placement, Replicate) for tensor in tensors for placement in tensor.placements):
        return _run_replicated(operator, args, kwargs, tensors[0])
    decomposition = _torch.decomposition(operator)
    if decomposition is not None:
        return decomposition(*args, **kwargs)
    raise refuse(_torch.name_of(operator), "there is no rule for it on tensors that are sharded", named,
                 "replicate them, if they are small: x.redistribute(placements=[Replicate()] * mesh.ndim); "
                 "on replicated tensors every operator works")  # fmt: skip


@with_constants
def by_torch(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on several tensors by DTensor's own strategy; plain tensors are constants, or refused."""
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    named = [(f"tensor {n}", tensor) for n, tensor in enumerate(tensors) if isinstance(tensor, DTensor) or tensor.dim()]
    specs_of(_torch.name_of(operator), named)
    return _torch.stock(operator, args, kwargs)


@with_constants
def in_place(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Run an in-place operator: its functional variant (by its rule if it has one), copied into the first argument."""
    functional = _torch.functional_of(operator)
    assert functional is not None
    target, values = args[0], functional(*args, **kwargs)
    if target.shape != values.shape:
        raise refuse("an operator that writes in place", "would change the shape of a DTensor",
                     (("target", target), ("values", values)), "use the out-of-place variant")  # fmt: skip
    aten.copy_.default(target, values)
    return target  # type: ignore[no-any-return]


@with_constants
def into_out(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with `out=`: its functional variant, and a copy of the results into the given tensors."""
    name, known = _torch.name_of(operator), _torch.signature(operator)
    outs = {known.names[number]: kwargs[known.names[number]] for number in sorted(known.written)}
    given = {key: value for key, value in kwargs.items() if key not in outs}
    returning = _torch.returning(operator)
    check_placed(name, tuple(outs.items()))
    if returning is None:
        raise refuse(name, "there is no rule for it with out=", tuple(outs.items()),
                     "call it without out=, and copy_ the result")  # fmt: skip
    if len(outs) == 1 and given.get("dtype", ...) is None:
        given["dtype"] = next(iter(outs.values())).dtype  # the dtype in which one device computes then
    made = returning(*args, **given)
    for (key, out), values in zip(outs.items(), made if isinstance(made, list | tuple) else (made,), strict=True):
        _fill_out(name, key, out, values)
    return tuple(outs.values()) if len(outs) > 1 else next(iter(outs.values()))


def _fill_out(operator: str, name: str, out: DTensor, values: DTensor) -> None:
    if not torch.can_cast(values.dtype, out.dtype):
        raise refuse(operator, f"the result, {values.dtype}, can't be cast to that of {name}", ((name, out),),
                     "give an out of the result's dtype")  # fmt: skip
    if out.shape != values.shape:
        raise refuse(operator, f"the result's shape {tuple(values.shape)} is not that of {name}", ((name, out),),
                     "give an out of the result's shape: that of a DTensor does not change")  # fmt: skip
    aten.copy_.default(out, values)


def _run_replicated(operator: _torch.Operator, args: Any, kwargs: Any, like: DTensor) -> Any:
    """Run an operator on replicated tensors: every rank computes the same."""
    args, kwargs = tree_map_only(DTensor, _torch.local_of, (args, kwargs))
    if like.device_mesh.get_coordinate() is None:
        raise refuse(_torch.name_of(operator), "this rank is not in the mesh", (("tensor", like),),
                     "call it on the ranks of the mesh alone")  # fmt: skip
    return tree_map_only(torch.Tensor, lambda made: as_replicated(made, like.device_mesh), operator(*args, **kwargs))
