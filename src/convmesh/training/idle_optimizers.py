"""Checks of optimizers before their first step with a distributed model.

Loaded state is placed on the mesh. Optimizers that train nothing get a warning: those made before `distribute`, which
replaces parameters, or for another model. Parameters cannot be replaced in place, as torch swaps no plain tensor for a
DTensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm import caller
from ..sharding.registry import while_installed
from .loaded_state import place_optimizer_state

_models: WeakSet[nn.Module] = WeakSet()
_replaced: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
_distributed = 0  # number of models distributed so far
# The number of models and the state at the last check; loading replaces the state.
_checked: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, Any]] = WeakKeyDictionary()


def remember(model: nn.Module, replaced: Iterable[torch.Tensor]) -> None:
    """Register a distributed model, and the parameters that were replaced."""
    global _distributed
    _distributed += 1
    _models.add(model)
    _replaced.update({id(parameter): parameter for parameter in replaced})


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Check an optimizer before its first step, and again after a model was distributed or a state was loaded."""
    if torch.compiler.is_compiling():
        return
    models, state = _checked.get(optimizer, (-1, None))
    if models == _distributed and state is optimizer.state:
        return
    _checked[optimizer] = _distributed, optimizer.state
    place_optimizer_state(optimizer)
    if models == _distributed:
        return
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    left = sum(_replaced.get(key) is parameter for key, parameter in held.items())
    # In a `functional_call` a model has tensors that are no leaves; torch warns when their gradients are read.
    found = [parameter for model in _models for parameter in model.parameters() if parameter.is_leaf]
    trained = [parameter for parameter in found if parameter.grad is not None]
    name = type(optimizer).__name__
    if left:
        _warn(f"{left} of the {len(held)} parameters of this {name} are from before convmesh.distribute, which has "
              "replaced them: nothing trains the new ones")  # fmt: skip
    elif trained and all(parameter.grad is None for parameter in held.values()):
        _warn(f"none of the {len(held)} parameters of this {name} has a gradient, while {len(trained)} of a "
              "distributed model that it does not hold have")  # fmt: skip


def _warn(what: str) -> None:
    where = caller()
    warnings.warn(
        f"{what}\n  remedy: make the optimizer after convmesh.distribute(model, mesh), of model.parameters(); its "
        f"state can be loaded from another one's: load_state_dict{f'{chr(10)}  at {where}' if where else ''}",
        stacklevel=3,
    )


while_installed(lambda: register_optimizer_step_pre_hook(_check_optimizer).remove)
