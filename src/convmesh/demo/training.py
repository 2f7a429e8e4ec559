"""The training loop, the same for one process without a mesh and for each rank of a mesh."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..models import UNet
from ..process_memory import peak_memory
from ..training import distribute, shard
from . import picture
from .settings import AXES, Settings
from .traffic import Layer, watch_step

# Adam takes a full step even for a gradient that is only rounding error, unless that is small against its epsilon.
EPSILON = 1e-4


@dataclass(frozen=True)
class Run:
    """What one process reports of its training. Pictures and weights are full tensors, and only on the first rank."""

    losses: list[float]
    seconds: list[float]  # the time of each step
    memory: int  # peak growth, in bytes, of the process's (or its GPU's) memory while it trained
    threads: int
    device: str
    layers: list[Layer]
    noisy: torch.Tensor | None
    output: torch.Tensor | None
    weights: torch.Tensor | None


def build(settings: Settings) -> UNet:
    """Build the network. Its last layer is zero, so training starts from no correction at all."""
    model = UNet(2, 3, 3, settings.channels, settings.strides, convs=1)
    nn.init.zeros_(model.exit.weight)
    nn.init.zeros_(model.exit.bias)
    return model


def train(settings: Settings, mesh: DeviceMesh | None, device: str, report: Callable[[float], None]) -> Run:
    """Train with Adam on a picture with new noise in every step; `report` gets each step's loss.

    The only changes for a mesh are that the model is distributed and the picture is sharded.
    """
    torch.manual_seed(settings.seed)
    dtype = torch.float64 if settings.double else torch.float32
    model: nn.Module = build(settings).to(device, dtype)
    clean = picture.load(settings).to(device, dtype)
    if mesh is not None:
        model, clean = distribute(model, mesh), shard(clean, mesh, **AXES)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.rate, eps=EPSILON)

    def corrected() -> tuple[torch.Tensor, torch.Tensor]:
        noisy = clean + settings.noise * torch.randn_like(clean)
        return noisy, noisy - model(noisy)

    def forward() -> torch.Tensor:
        optimizer.zero_grad()
        return F.mse_loss(corrected()[1], clean)

    losses: list[float] = []
    seconds: list[float] = []

    def steps() -> None:
        for _ in range(settings.steps):
            began = time.perf_counter()
            loss = forward()
            loss.backward()
            optimizer.step()
            losses.append(_full(loss.detach()).item())  # also waits until the step is done
            seconds.append(time.perf_counter() - began)
            report(losses[-1])

    memory = peak_memory(steps) if device == "cpu" else _peak_on_gpu(steps)
    with torch.no_grad():
        noisy, output = (picture.to_bytes(_full(part)) for part in corrected())
    weights = torch.cat([_full(parameter.detach()).reshape(-1).cpu() for parameter in model.parameters()])
    layers = [] if mesh is None else watch_step(model, forward, (mesh.size(0), mesh.size(1)))
    first = mesh is None or mesh.get_rank() == 0
    shown = (noisy, output, weights) if first else (None, None, None)
    return Run(losses, seconds, memory, torch.get_num_threads(), device, layers, *shown)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor, for the report: training itself gathers nothing."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _peak_on_gpu(work: Callable[[], object]) -> int:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before
