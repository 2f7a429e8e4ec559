"""Checks that replicated parameters are still equal on all ranks, at optimizer steps 2, 4, 8, ...

If one rank does something differently (a learning rate, a number in the loss, a sum in another order), they drift
apart, and nothing else would show it.
"""

from __future__ import annotations

import warnings
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import _torch, comm
from ..sharding.plan_cache import PerProcessGroup
from ..sharding.registry import while_installed
from .same_data import checksum

# Steps whose number is a power of two. Devices other than CPUs have to finish their work first, so they start later.
FIRST_STEP = {"cpu": 2}
FIRST_STEP_ELSEWHERE = 64

_steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
_compared = PerProcessGroup(dict)  # number of comparisons by mesh, counted alike on all of its ranks


def _look(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or _torch.tracing():
        return
    number = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if number & (number - 1):
        return
    by_mesh: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter, DTensor) and all(isinstance(one, Replicate) for one in parameter.placements):
            by_mesh.setdefault(parameter.device_mesh, []).append(_torch.local_of(parameter).detach())
    for mesh, parameters in by_mesh.items():
        if number >= FIRST_STEP.get(mesh.device_type, FIRST_STEP_ELSEWHERE) and _torch.has_values(mesh):
            _compare(mesh, parameters, type(optimizer).__name__)


def _compare(mesh: DeviceMesh, parameters: list[torch.Tensor], name: str) -> None:
    """Compare checksums through the store of the process group: the training's own communication is not affected."""
    if mesh.get_coordinate() is None or mesh.size() == 1:
        return
    counts: dict[DeviceMesh, int] = _compared.get()
    counts[mesh] = counts.get(mesh, 0) + 1
    question = f"parameters on {mesh.shape} {mesh.mesh_dim_names}, {counts[mesh]}"
    said = list(comm.of_all_ranks(question, lambda: _digest(parameters), mesh).values())
    if len(said) > 1:
        warnings.warn(
            f"the replicated parameters of this {name} are not the same on all ranks, but on ranks "
            f"{'; '.join(', '.join(map(str, ranks)) for ranks in said)}\n"
            "  remedy: let all ranks do the same: learning rates, numbers in the loss, random draws, machines",
            stacklevel=4,
        )


def _digest(parameters: list[torch.Tensor]) -> str:
    return blake2b(repr([checksum(parameter) for parameter in parameters]).encode(), digest_size=8).hexdigest()


while_installed(lambda: register_optimizer_step_pre_hook(_look).remove)
