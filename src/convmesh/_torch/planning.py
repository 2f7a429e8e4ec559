"""Dry runs of one rank of a mesh: the other ranks do not exist, tensors have sizes but no values, nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed import fake_pg

from .names import Store

DEVICE = "meta"  # of such a mesh: operators only compute shapes and strides


def has_values(mesh: DeviceMesh) -> bool:
    """Whether the tensors of a mesh have values that ranks could compare; False in a dry run."""
    return mesh.device_type != DEVICE


def silent_group(options: Any) -> dist.ProcessGroup:
    """Return a group that sends nothing, or torch's backend for one; `options` are torch's for a new group."""
    made: Any = fake_pg._create_fake_pg(options, None)
    return made  # type: ignore[no-any-return]


class SilentStore(Store):
    """A store for a rank without others: it returns what the rank itself has set last."""

    def __init__(self) -> None:
        super().__init__()
        self._said = b""

    def set(self, key: str, value: str | bytes) -> None:
        self._said = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        return self._said

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        pass

    def add(self, key: str, value: int) -> int:
        return value


class _Streams:
    """The device module that FSDP2 needs, which torch has for all device types but meta: its streams do nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        return 0


@contextmanager
def steps_without_values() -> Iterator[None]:
    """Context manager in which `fully_shard` and `GradScaler` accept a meta mesh.

    `fully_shard` then takes parameters that never get values. A `GradScaler`, which skips steps with gradients that are
    not finite, takes all steps.
    """
    check, step = FSDPParamGroup._validate_no_meta_params, GradScaler._maybe_opt_step
    setattr(torch, DEVICE, _Streams())
    FSDPParamGroup._validate_no_meta_params = lambda group: None  # type: ignore[method-assign]
    GradScaler._maybe_opt_step = _step_of(step)  # type: ignore[method-assign]
    try:
        yield
    finally:
        delattr(torch, DEVICE)
        FSDPParamGroup._validate_no_meta_params = check  # type: ignore[method-assign]
        GradScaler._maybe_opt_step = step  # type: ignore[method-assign]


def _step_of(stock: Any) -> Any:
    def step(scaler: GradScaler, optimizer: torch.optim.Optimizer, state: Any, *args: Any, **kwargs: Any) -> Any:
        if any(found.is_meta for found in state["found_inf_per_device"].values()):
            return optimizer.step(*args, **kwargs)
        return stock(scaler, optimizer, state, *args, **kwargs)

    return step


def running_node() -> Any:
    """Return the autograd node whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()
