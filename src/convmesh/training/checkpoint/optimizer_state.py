"""The state of an optimizer by parameter names.

An optimizer numbers its parameters. Here their state has names, and only existing state is saved and loaded: a
parameter that never had a gradient has none, before and after. (torch's own helper lets optimizers take a step before
loading, which gives such parameters a state that the saved training did not have.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from .shards import Saved, Target, tensors_in

Names = Mapping[int, str]


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return parameter names by id, those of the first module that has each.

    `_orig_mod` of compiled modules is removed.
    """
    names: dict[int, str] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{module_name}.{name.replace('_orig_mod.', '')}")
    return names


def collect(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Return an optimizer's class, the settings of its parameter groups, and the state of each parameter."""
    return {
        "class": type(optimizer).__qualname__,
        "groups": [group | {"params": [_name(p, names) for p in group["params"]]} for group in optimizer.param_groups],
        "state": {_name(parameter, names): dict(state) for parameter, state in optimizer.state.items()},
    }


def check(name: str, optimizer: Optimizer, names: Names, saved: Mapping[str, Any], path: Path) -> None:
    """Raise unless the optimizer has the saved class, and the same parameters in the same groups."""
    if type(optimizer).__qualname__ != saved["class"]:
        raise CheckpointError(
            f"load_checkpoint: {name!r} in {path} is the state of a {saved['class']}, not of a "
            f"{type(optimizer).__qualname__}\n  remedy: make the optimizer as it was made before, or leave it out"
        )
    own = [[_name(p, names) for p in group["params"]] for group in optimizer.param_groups]
    if own != [group["params"] for group in saved["groups"]]:
        raise CheckpointError(
            f"load_checkpoint: {name!r} has other parameters, or has them in other groups or in another order, than in "
            f"{path}\n  remedy: make the optimizer as it was made before"
        )


def targets(optimizer: Optimizer, names: Names, saved: Mapping[str, Any]) -> Iterator[Target]:
    """Yield where to load each saved tensor: like its parameter, or plain."""
    parameters = {_name(p, names): p for group in optimizer.param_groups for p in group["params"]}
    for owner, state in saved["state"].items():
        for what, value in state.items():
            # A step count may have the shape of its parameter by chance, but is never a part of it. Scalars are not
            # either, but everything else is on the parameter's mesh.
            shape, own = value.shape if isinstance(value, Saved) else (), parameters[owner].shape
            beside = what != "step" and (shape == own or shape != ())
            yield from tensors_in(value, parameters[owner] if beside else None)
    yield from tensors_in(saved["groups"])


def restore(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the optimizer's state and settings."""
    owners = [owner for group in saved["groups"] for owner in group["params"]]
    numbers = {owner: number for number, owner in enumerate(owners)}
    settings = [group | {"params": [numbers[owner] for owner in group["params"]]} for group in saved["groups"]]
    state = {numbers[owner]: state for owner, state in saved["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": settings})


def _name(parameter: torch.Tensor | DTensor, names: Names) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"checkpoint: an optimizer has a parameter of shape {tuple(parameter.shape)} that no module has\n"
            "  remedy: give the module that it belongs to as well: save_checkpoint(..., critic=critic)"
        )
    return names[id(parameter)]
