"""The state of an optimizer by the names of its parameters.

An optimizer numbers its parameters. Here their state goes by name, and only what is there is saved and loaded: a
parameter that never had a gradient has no state, before as after. (torch's own helper for this makes optimizers take a
step before loading, which leaves such parameters with a state that the saved training did not have.)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .errors import CheckpointError

Names = Mapping[int, str]


def parameter_names(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """By id. Those of the first module that has a parameter; a compiled module's are those of the module itself."""
    names: dict[int, str] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{module_name}.{name.replace('_orig_mod.', '')}")
    return names


def flat(name: str, optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """All state, under '<optimizer>/<parameter>/<what>'."""
    return {
        f"{name}/{_name(parameter, names)}/{what}": value
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
    }


def groups(optimizer: Optimizer, names: Names) -> list[dict[str, Any]]:
    """The settings of each group of parameters, which are given by name."""
    return [group | {"params": [_name(p, names) for p in group["params"]]} for group in optimizer.param_groups]


def check_groups(name: str, optimizer: Optimizer, names: Names, saved: list[dict[str, Any]], path: Path) -> None:
    if [group["params"] for group in groups(optimizer, names)] != [group["params"] for group in saved]:
        raise CheckpointError(
            f"load_checkpoint: {name!r} has other parameters, or has them in other groups or in another order, than in "
            f"{path}\n  remedy: make the optimizer as it was made before"
        )


def template(name: str, optimizer: Optimizer, names: Names, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A place for each tensor of state that was saved: beside its parameter where it is of its shape."""
    parameters = {_name(p, names): p for group in optimizer.param_groups for p in group["params"]}
    places: dict[str, Any] = {}
    for key, data in saved.items():
        if key.startswith(f"{name}/"):
            _, owner, what = key.split("/")
            parameter, kind = parameters[owner].detach(), data.properties.dtype
            # A count of steps may have the shape of its parameter by chance, and is never a part of it.
            beside = what != "step" and data.size == parameter.shape
            places[key] = torch.zeros_like(parameter, dtype=kind) if beside else torch.zeros(data.size, dtype=kind)
    return places


def restore(name: str, optimizer: Optimizer, loaded: Mapping[str, Any], saved: list[dict[str, Any]]) -> None:
    """Give the optimizer its state and settings back."""
    numbers = {owner: number for number, owner in enumerate(owner for group in saved for owner in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for key, value in loaded.items():
        if key.startswith(f"{name}/"):
            _, owner, what = key.split("/")
            state.setdefault(numbers[owner], {})[what] = value
    settings = [group | {"params": [numbers[owner] for owner in group["params"]]} for group in saved]
    optimizer.load_state_dict({"state": state, "param_groups": settings})


def _name(parameter: torch.Tensor | DTensor, names: Names) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"checkpoint: an optimizer has a parameter of shape {tuple(parameter.shape)} that no module has\n"
            "  remedy: give the module that it belongs to as well: save_checkpoint(..., critic=critic)"
        )
    return names[id(parameter)]
