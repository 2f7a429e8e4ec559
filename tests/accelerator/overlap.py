"""What a rank with the stand-in accelerator does, one after the other, while an exchange of halos is under way."""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh
from tests.accelerator import DEVICE

START, WAIT = "all_to_all_single", "wait_tensor"


class Event(NamedTuple):
    """An operator on local tensors, or a collective: when it was called and when it returned, in seconds."""

    name: str
    began: float
    ended: float


class Trace(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        began = perf_counter()
        result = operator(*args, **kwargs or {})
        self.events.append(Event(operator._schema.name.partition("::")[2], began, perf_counter()))
        return result


def convolution(mesh: DeviceMesh) -> dict[str, list[Event]]:
    """The events of a convolution's forward and backward pass, of tiles that are large against their halos."""
    convmesh.enable()
    torch.manual_seed(0)
    x = convmesh.shard(torch.randn(1, 16, 256, 128).to(DEVICE), mesh, h=2).requires_grad_()
    weight = convmesh.replicate(torch.randn(16, 16, 3, 3).to(DEVICE), mesh).requires_grad_()
    found = {}
    for _ in range(2):  # plans are made in the first
        with Trace() as forward:
            y = F.conv2d(x, weight, padding=1)
        gradient = torch.ones_like(y)
        with Trace() as backward:
            y.backward(gradient)
        found = {"forward": forward.events, "backward": backward.events}
    return found


def under_way(events: list[Event]) -> list[str]:
    """The operators that were called after the first exchange had begun and before somebody waited for it."""
    names = [event.name for event in events]
    return names[names.index(START) + 1 : names.index(WAIT)]
