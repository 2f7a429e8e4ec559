"""Training steps of a U-Net: whether losses equal one device's, how steps scale with ranks, and the host's overhead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm import count_traffic
from ..models import UNet
from ..training import distribute, shard
from .timing import Stopwatch

STEP_SECONDS = 0.3  # how long one device should need for the step whose scaling is measured
SMALLEST, LARGEST, TINY = 64, 8192, 16  # sides of pictures, in pixels
EXACT_STEPS = 3


class Step:
    """A training step of a U-Net on a picture: on one device, or with the rows sharded over a mesh."""

    def __init__(
        self,
        side: int,
        mesh: DeviceMesh | None,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        width: int = 8,
    ):
        torch.manual_seed(0)
        model: nn.Module = UNet(2, 3, 2, (width, 2 * width, 4 * width), (2, 2)).to(device, dtype)
        picture = torch.rand(1, 3, side, side, dtype=dtype)
        labels = (picture[:, 0] > 0.5).long()
        if mesh is None:
            self.model, self.picture, self.labels = model, picture.to(device), labels.to(device)
        else:
            self.model = distribute(model, mesh)
            self.picture, self.labels = shard(picture, mesh, h=2), shard(labels, mesh, h=1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.picture), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def losses(self, steps: int) -> list[float]:
        found = [self() for _ in range(steps)]
        return [(one.full_tensor() if isinstance(one, DTensor) else one).item() for one in found]


@dataclass(frozen=True)
class Losses:
    """The losses of the same training on one device and on all ranks, in float64."""

    one: tuple[float, ...]
    many: tuple[float, ...]

    @property
    def apart(self) -> float:
        """The greatest relative difference."""
        return max(abs(a - b) / abs(a) for a, b in zip(self.one, self.many, strict=True))

    @property
    def right(self) -> bool:
        """Rounding (1e-16) grows over some steps of training; a wrong border gives differences of about a hundredth."""
        return self.apart < 1e-9


def compare_losses(mesh: DeviceMesh, device: torch.device) -> Losses:
    """Train on one device and on all ranks. All ranks must call this."""
    exact = torch.float64
    one, many = (Step(SMALLEST, place, device, exact, width=4).losses(EXACT_STEPS) for place in (None, mesh))
    return Losses(tuple(one), tuple(many))


@dataclass(frozen=True)
class Scaling:
    """Seconds of a step on `ranks` ranks, and the fraction of them in which the slowest rank waited for others."""

    ranks: int
    side: int
    seconds: float
    waiting: float


def numbers_of_ranks(ranks: int) -> list[int]:
    """Return 1, 2, 4, ... and `ranks`."""
    doubled = [2**power for power in range(ranks.bit_length())]
    return sorted({*doubled, ranks})


def fitting_side(watch: Stopwatch) -> int:
    """Return the side of a picture that takes one device long enough, measured by the first rank and broadcast."""
    side = SMALLEST
    if dist.get_rank() == 0:
        while side < LARGEST and _seconds_of_one(watch, side) < STEP_SECONDS:
            side *= 2
    told = torch.tensor(side, device=watch.device)
    dist.broadcast(told, 0)
    return int(told)


def _seconds_of_one(watch: Stopwatch, side: int) -> float:
    step = Step(side, None, watch.device)
    step()
    watch.wait()
    began = time.perf_counter()
    step()
    watch.wait()
    return time.perf_counter() - began


def measure_step(watch: Stopwatch, step: Step) -> tuple[float, float]:
    """Return the seconds of a step, and the seconds of them in which this rank waited for others."""
    with count_traffic() as traffic:
        seconds, waited = watch.measure(step, (time.perf_counter, lambda: traffic.seconds_waiting))
    return seconds, min(seconds, waited)


def measure_scaling(watch: Stopwatch, counts: Sequence[int], side: int) -> list[Scaling]:
    """Measure steps on the first 1, 2, 4, ... ranks, those of them that include this rank. All ranks must call this."""
    found = []
    for count in counts:
        mesh = DeviceMesh(watch.device.type, torch.arange(count), mesh_dim_names=("h",)) if count > 1 else None
        if dist.get_rank() < count:
            seconds, waited = measure_step(watch, Step(side, mesh, watch.device))
            found.append(Scaling(count, side, seconds, waited / seconds))
        dist.barrier()
    return found


@dataclass(frozen=True)
class HostTime:
    """Seconds of a step on a tiny picture, which are host time: on one device, and on a rank that waits for nobody."""

    one: float
    rank: float


def measure_host_time(watch: Stopwatch, ranks: int) -> HostTime:
    """Measure the host's time per step, among so many ranks that send each other nothing. All ranks must call this."""
    # Ranks on CPUs may have to share cores.
    clock = time.thread_time if watch.device.type == "cpu" else time.perf_counter
    silent = dist.new_group(backend=f"{watch.device.type}:fake")
    mesh = DeviceMesh.from_group(silent, watch.device.type, mesh_dim_names=("h",)) if ranks > 1 else None
    steps = Step(TINY, None, watch.device), Step(TINY * ranks, mesh, watch.device)
    for step in steps:
        step.optimizer.param_groups[0]["lr"] = 0.0  # gradients are no sums, and parameters have to stay the same
    return HostTime(*(watch.measure(step, (clock,))[0] for step in steps))
