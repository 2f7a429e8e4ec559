"""The contents of a checkpoint: the objects passed to it, each with its state, and the random state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.optim import Optimizer

from ..errors import CheckpointError
from . import optimizer_state
from .shards import Saved, Target, copy_local, local_of, tensors_in

_SHOWN = 5
Undo = list[Callable[[], object]]


class Contents:
    """The objects of a checkpoint by kind: modules and optimizers with tensors, others with a state or plain value."""

    def __init__(self, objects: Mapping[str, Any]):
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        tensors = self.modules.keys() | self.optimizers.keys()
        self.others = {name: value for name, value in objects.items() if name not in tensors}
        self.names = optimizer_state.parameter_names(self.modules)

    def collect(self, step: int) -> dict[str, Any]:
        """Return everything to be saved, in sections."""
        stateful = {name: value for name, value in self.others.items() if hasattr(value, "state_dict")}
        return {
            "step": step,
            "modules": {name: dict(get_model_state_dict(module)) for name, module in self.modules.items()},
            "optimizers": {
                n: optimizer_state.collect(optimizer, self.names) for n, optimizer in self.optimizers.items()
            },
            "states": {n: {"class": _class(value), "state": value.state_dict()} for n, value in stateful.items()},
            "values": {name: value for name, value in self.others.items() if name not in stateful},
            "random": {device: module.get_rng_state() for device, module in self._generators().items()},
        }

    def targets(self, saved: Mapping[str, Any], random_state: bool, path: Path) -> list[Target]:
        """Return where to load each tensor. Raises if the checkpoint does not match these objects."""
        self._check_present(saved, path)
        found: list[Target] = []
        for name, module in self.modules.items():
            own: Mapping[str, Any] = get_model_state_dict(module)
            _compare(name, own, saved["modules"].get(name, {}), path)
            found += tensors_in(saved["modules"][name], own)
        for name, optimizer in self.optimizers.items():
            optimizer_state.check(name, optimizer, self.names, saved["optimizers"][name], path)
            found += optimizer_state.targets(optimizer, self.names, saved["optimizers"][name])
        for name, value in self.others.items():
            found += tensors_in(saved["states"][name]["state"], value.state_dict())
        return [*found, *tensors_in(saved["values"]), *tensors_in(saved["random"] if random_state else {})]

    def apply(self, loaded: Mapping[str, Any], random_state: bool, undo: Undo) -> None:
        """Load all objects. Functions that revert it are added to `undo`, for the case of a failure."""
        for name, module in self.modules.items():
            _set_module(module, loaded["modules"][name], undo)
        for name, optimizer in self.optimizers.items():
            before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            undo.append(_call(optimizer.__dict__.update, before))
            optimizer_state.restore(optimizer, loaded["optimizers"][name])
        for name, value in self.others.items():
            undo.append(_call(value.load_state_dict, copy.deepcopy(value.state_dict())))
            value.load_state_dict(loaded["states"][name]["state"])
        for device, generator in self._generators().items():
            if random_state and device in loaded["random"]:
                undo.append(_call(generator.set_rng_state, generator.get_rng_state()))
                generator.set_rng_state(loaded["random"][device])

    def _check_present(self, saved: Mapping[str, Any], path: Path) -> None:
        for name, value in self.others.items():
            if not hasattr(value, "load_state_dict") or name not in saved["states"]:
                raise CheckpointError(
                    f"load_checkpoint: {path} has no state of {name!r} to load into a {type(value).__name__}; it has "
                    f"states of {sorted(saved['states'])} and values of {sorted(saved['values'])}\n"
                    "  remedy: ask for what was saved; plain values are in the result's `extra`"
                )
            if saved["states"][name]["class"] != _class(value):
                raise CheckpointError(
                    f"load_checkpoint: {name!r} in {path} is the state of a {saved['states'][name]['class']}, not of a "
                    f"{_class(value)}\n  remedy: make it as it was made before, or leave it out"
                )
        for name in self.optimizers:
            if name not in saved["optimizers"]:
                raise CheckpointError(f"load_checkpoint: {path} was saved without an optimizer {name!r}\n"
                                      "  remedy: leave it out, or load another checkpoint")  # fmt: skip

    def _generators(self) -> dict[str, Any]:
        """Return torch's modules that draw random numbers: for the CPU, and for the devices of the models."""
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        devices = {parameter.device.type for parameter in parameters} - {"cpu", "meta"}
        return {"cpu": torch, **{device: torch.get_device_module(device) for device in sorted(devices)}}


def _set_module(module: nn.Module, loaded: Mapping[str, Any], undo: Undo) -> None:
    own: Mapping[str, Any] = get_model_state_dict(module)
    tensors = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
    others = {key: value for key, value in own.items() if key not in tensors}
    if others:  # an empty dict would be taken for a file that only the first rank has
        undo.append(_call(set_model_state_dict, module, others, options=StateDictOptions(strict=False)))
    undo.extend(_call(copy_local, value, local_of(value).to("cpu", copy=True)) for value in tensors.values())
    set_model_state_dict(module, dict(loaded))


def _call(function: Callable[..., object], *args: Any, **kwargs: Any) -> Callable[[], object]:
    return lambda: function(*args, **kwargs)


def _class(value: Any) -> str:
    return type(value).__qualname__


def _compare(name: str, own: Mapping[str, Any], saved: Mapping[str, Any], path: Path) -> None:
    missing = [f"{name}/{key}" for key in own if key not in saved]
    unknown = [f"{name}/{key}" for key in saved if key not in own]
    both = [(f"{name}/{key}", value, saved[key]) for key, value in own.items() if key in saved]
    kinds = [key for key, mine, its in both if isinstance(mine, torch.Tensor) is not isinstance(its, Saved)]
    pairs = [(key, mine, its) for key, mine, its in both if isinstance(mine, torch.Tensor) and isinstance(its, Saved)]
    shapes = [f"{key} {its.shape} for {tuple(mine.shape)}" for key, mine, its in pairs if its.shape != mine.shape]
    dtypes = [f"{key} {its.dtype} for {mine.dtype}" for key, mine, its in pairs if its.dtype != mine.dtype]
    found = {"missing:": missing, "unexpected:": unknown, "of another shape:": shapes,
             "of another dtype:": dtypes, "a tensor on one side only:": kinds}  # fmt: skip
    problems = [f"{title} {first_few(keys)}" for title, keys in found.items() if keys]
    if problems:
        raise CheckpointError(
            f"load_checkpoint: {path} is of another model: {'; '.join(problems)}\n"
            "  remedy: build the model as it was when the checkpoint was saved"
        )
    if any(mine.is_meta for _, mine, _ in pairs):
        raise CheckpointError(f"load_checkpoint: {name!r} is on the meta device, which has no values\n"
                              "  remedy: model.to_empty(device=...) first")  # fmt: skip


def first_few(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
