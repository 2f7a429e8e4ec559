"""What is in a checkpoint: tensors by name, each written by the ranks that have it, and the rest in one piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from . import optimizer_state
from .errors import CheckpointError

REST = "rest"
_SHOWN = 5


class Contents:
    """The objects of a checkpoint by kind: modules and optimizers have tensors, others a state or just a value."""

    def __init__(self, objects: Mapping[str, Any]):
        self.modules = {name: value for name, value in objects.items() if isinstance(value, nn.Module)}
        self.optimizers = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
        tensors = self.modules.keys() | self.optimizers.keys()
        self.others = {name: value for name, value in objects.items() if name not in tensors and value is not None}
        self.names = optimizer_state.parameter_names(self.modules)

    def collect(self, step: int) -> dict[str, Any]:
        """Everything to be saved, under flat names."""
        rest: dict[str, Any] = {"step": step, "values": {}, "states": {}, "groups": {}, "loose": {}}
        rest["random"] = {device: module.get_rng_state() for device, module in self._generators().items()}
        state: dict[str, Any] = {}
        for name, module in self.modules.items():
            state |= {f"{name}/{key}": value for key, value in get_model_state_dict(module).items()}
        for name, optimizer in self.optimizers.items():
            state |= optimizer_state.flat(name, optimizer, self.names)
            rest["groups"][name] = optimizer_state.groups(optimizer, self.names)
        for name, value in self.others.items():
            stateful = hasattr(value, "state_dict")
            rest["states" if stateful else "values"][name] = value.state_dict() if stateful else value
        rest["loose"] = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        if any(isinstance(leaf, DTensor) for leaf in _leaves(rest)):
            raise CheckpointError(
                "save_checkpoint: a DTensor is among the plain values or states\n"
                "  remedy: give the module or optimizer that it belongs to, or tensor.full_tensor()"
            )
        return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)} | {REST: rest}

    def template(self, metadata: Mapping[str, Any], rest: dict[str, Any], path: Path) -> dict[str, Any]:
        """Where to load each tensor to. Raises if the checkpoint is not one of these objects."""
        self._check_present(rest, path)
        saved = {key: data for key, data in metadata.items() if isinstance(data, TensorStorageMetadata)}
        state: dict[str, Any] = {}
        for name, module in self.modules.items():
            own = get_model_state_dict(module)
            wanted = {f"{name}/{key}": value for key, value in own.items() if isinstance(value, torch.Tensor)}
            _compare(wanted, {key: data.size for key, data in saved.items() if key.startswith(f"{name}/")}, path)
            state |= wanted
        for name, optimizer in self.optimizers.items():
            optimizer_state.check_groups(name, optimizer, self.names, rest["groups"][name], path)
            state |= optimizer_state.template(name, optimizer, self.names, saved)
        return state

    def apply(self, state: dict[str, Any], rest: dict[str, Any], random_state: bool) -> None:
        """Give all objects what was loaded for them."""
        loaded = rest["loose"] | state
        for name, module in self.modules.items():
            prefix = f"{name}/"
            own = {key.removeprefix(prefix): value for key, value in loaded.items() if key.startswith(prefix)}
            set_model_state_dict(module, own)
        for name, optimizer in self.optimizers.items():
            optimizer_state.restore(name, optimizer, loaded, rest["groups"][name])
        for name, value in self.others.items():
            value.load_state_dict(rest["states"][name])
        if random_state:
            for device, module in self._generators().items():
                if device in rest["random"]:
                    module.set_rng_state(rest["random"][device])

    def _check_present(self, rest: dict[str, Any], path: Path) -> None:
        for name, value in self.others.items():
            if not hasattr(value, "load_state_dict") or name not in rest["states"]:
                raise CheckpointError(
                    f"load_checkpoint: {path} has no state of {name!r} to load into a {type(value).__name__}; it has "
                    f"states of {sorted(rest['states'])} and values of {sorted(rest['values'])}\n"
                    "  remedy: ask for what was saved; plain values are in the result's `extra`"
                )
        for name in self.optimizers:
            if name not in rest["groups"]:
                raise CheckpointError(f"load_checkpoint: {path} was saved without an optimizer {name!r}\n"
                                      "  remedy: leave it out, or load another checkpoint")  # fmt: skip

    def _generators(self) -> dict[str, Any]:
        """What draws random numbers: on the CPU, and on the devices of the modules."""
        parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        devices = {parameter.device.type for parameter in parameters} - {"cpu", "meta"}
        return {"cpu": torch.random} | {device: torch.get_device_module(device) for device in sorted(devices)}


def _compare(wanted: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Size], path: Path) -> None:
    missing = [key for key in wanted if key not in saved]
    unknown = [key for key in saved if key not in wanted]
    other = [f"{key} {tuple(saved[key])} for {tuple(tensor.shape)}" for key, tensor in wanted.items()
             if key in saved and saved[key] != tensor.shape]  # fmt: skip
    found = {"it lacks": missing, "it has besides": unknown, "it has in another shape": other}
    problems = [f"{title} {_some(keys)}" for title, keys in found.items() if keys]
    if problems:
        raise CheckpointError(
            f"load_checkpoint: {path} is of another model: {'; '.join(problems)}\n"
            "  remedy: build the model as it was when the checkpoint was saved"
        )


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value
