"""The state of an optimizer by the names of its parameters.

An optimizer numbers its parameters. Here their state goes by name, and only what is there is saved and loaded: a
parameter that never had a gradient has no state, before as after. (torch's own helper for this makes optimizers take a
step before loading, which leaves such parameters with a state that the saved training did not have.)
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
    """By id. Those of the first module that has a parameter; a compiled module's are those of the module itself."""
    names: dict[int, str] = {}
    for module_name, module in modules.items():
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{module_name}.{name.replace('_orig_mod.', '')}")
    return names


def collect(optimizer: Optimizer, names: Names) -> dict[str, Any]:
    """Its class, the settings of its groups of parameters, and the state of each parameter."""
    return {
        "class": type(optimizer).__qualname__,
        "groups": [group | {"params": [_name(p, names) for p in group["params"]]} for group in optimizer.param_groups],
        "state": {_name(parameter, names): dict(state) for parameter, state in optimizer.state.items()},
    }


def check(name: str, optimizer: Optimizer, names: Names, saved: Mapping[str, Any], path: Path) -> None:
    """Raises unless the optimizer is of the class that was saved, and has the same parameters in the same groups."""
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
    """A place for each tensor that was saved, beside its parameter."""
    parameters = {_name(p, names): p for group in optimizer.param_groups for p in group["params"]}
    for owner, state in saved["state"].items():
        for what, value in state.items():
            # A count of steps may have the shape of its parameter by chance, and is never a part of it.
            # Single numbers are not either, but all else lives on the parameter's mesh.
            shape, own = value.shape if isinstance(value, Saved) else (), parameters[owner].shape
            beside = what != "step" and (shape == own or shape != ())
            yield from tensors_in(value, parameters[owner] if beside else None)
    yield from tensors_in(saved["groups"])


def restore(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the optimizer its state and settings back."""
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
