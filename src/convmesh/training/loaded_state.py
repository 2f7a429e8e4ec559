"""Loading plain state, which only the first rank needs to have, into a distributed model or its optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from .. import _torch
from .checkpoint.values import dtype_called, dtype_name
from .random_state import of_first_rank


def watch_loading(module: nn.Module) -> None:
    """Let a module take plain state, and its submodules when it is given to them by themselves."""
    for part in module.modules():
        part.register_load_state_dict_pre_hook(place_loaded if part is module else _place_alone)


def _place_alone(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    if not prefix:
        place_loaded(module, state_dict, prefix)


def place_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Convert plain tensors that are about to be loaded to the module's layouts, with the first rank's values.

    Only the first rank must have them: a rank that passes an empty dict gets the first rank's. Keys that only other
    ranks have are removed, so that all ranks find the same keys missing, unexpected or of another shape.
    """
    found = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    own = {prefix + name: tensor for name, tensor in found}
    placed = {key: tensor for key, tensor in own.items() if isinstance(tensor, DTensor)}
    given = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    plain = [key for key, value in given.items() if _is_plain(value) and (key in placed or key not in own)]
    if not placed or (given and not plain):  # each rank loads DTensors by itself
        return
    mesh = max((tensor.device_mesh for tensor in placed.values()), key=lambda mesh: mesh.size())
    for key in _as_on_first_rank(state_dict, plain, prefix, mesh):
        if key in placed and state_dict[key].shape == placed[key].shape:
            value, like = state_dict[key], placed[key]
            if like.device_mesh != mesh and mesh.get_coordinate() is not None:  # buffers beside FSDP's parameters
                value = of_first_rank(value, mesh)
            state_dict[key] = distributed_like(value, like)


def place_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Convert plain optimizer state of DTensor parameters, such as a loaded one, to the parameters' layouts.

    Single numbers stay plain: so does the step count in every optimizer.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(parameter, DTensor) and _is_plain(value) and value.dim():
                state[name] = distributed_like(value, parameter)


def distributed_like(tensor: torch.Tensor, like: DTensor) -> DTensor:
    """Return the first rank's values on the device and mesh of `like`, sharded like it if the shapes are equal."""
    mesh = like.device_mesh
    placements = like.placements if tensor.shape == like.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(tensor.detach().to(like.device), mesh, placements)


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor)


def _as_on_first_rank(state: dict[str, Any], plain: Iterable[str], prefix: str, mesh: DeviceMesh) -> list[str]:
    """Give this rank plain tensors with the first rank's keys, shapes and dtypes; return the keys in its order."""
    if mesh.get_coordinate() is None or not _torch.has_values(mesh):
        return list(plain)
    mine = [(key.removeprefix(prefix), list(state[key].shape), dtype_name(state[key].dtype)) for key in plain]
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    length = of_first_rank(torch.tensor([len(text)]), mesh)
    letters = text.new_zeros(int(length))
    letters[: len(text)] = text[: len(letters)]
    first = [(prefix + key, tuple(shape), dtype_called(dtype))
             for key, shape, dtype in json.loads(bytes(of_first_rank(letters, mesh).tolist()))]  # fmt: skip
    for key in set(plain) - {key for key, _, _ in first}:
        del state[key]
    for key, shape, dtype in first:
        value: Any = state.get(key)
        if not _is_plain(value) or tuple(value.shape) != shape or value.dtype != dtype:
            state[key] = torch.empty(shape, dtype=dtype)
    return [key for key, _, _ in first]
