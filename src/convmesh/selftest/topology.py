"""What the test runs on: versions, hosts, devices and relevant settings. Hosts are numbered, not named."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .. import _torch
from ..report.words import count

SETTINGS = ("NCCL_", "TORCH_NCCL_", "GLOO_", "OMP_", "CONVMESH_", "CUDA_VISIBLE_DEVICES", "TORCH_DISTRIBUTED_DEBUG")


@dataclass(frozen=True)
class Place:
    """The host, device and settings of one rank."""

    host: str
    device: str
    settings: tuple[tuple[str, str], ...]
    cores: int  # that compute, where there is no other device

    @classmethod
    def here(cls, device: torch.device) -> Place:
        settings = tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS)))
        # torchrun's nodes may be containers with the same host name.
        host = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
        return cls(host, _name(device), settings, _cores() if device.type == "cpu" else 0)


@dataclass(frozen=True)
class Topology:
    """Versions, backend and settings, and the host and device of each rank."""

    versions: dict[str, str]
    backend: str
    hosts: tuple[int, ...]  # the number of each rank's host
    devices: tuple[str, ...]  # the device of each rank
    settings: dict[str, str]
    cores: tuple[int, ...] = ()  # the cores of each rank's host, if ranks compute on CPUs

    @classmethod
    def of(cls, places: Sequence[Place]) -> Topology:
        names = list(dict.fromkeys(place.host for place in places))
        settings: dict[str, str] = {}
        for name, value in dict.fromkeys(setting for place in places for setting in place.settings):
            settings[name] = f"{settings[name]}; {value}" if name in settings else value
        hosts = tuple(names.index(place.host) for place in places)
        devices, cores = tuple(place.device for place in places), tuple(place.cores for place in places)
        return cls(_versions(), dist.get_backend(), hosts, devices, settings, cores if all(cores) else ())

    @property
    def summary(self) -> str:
        """For example '8 ranks on 2 hosts, NVIDIA H100, nccl'."""
        ranks, hosts = count(len(self.hosts), "rank"), count(len(set(self.hosts)), "host")
        return f"{ranks} on {hosts}, {', '.join(dict.fromkeys(self.devices))}, {self.backend}"

    @property
    def crowded(self) -> str:
        """'4 ranks of a host share 2 cores', where that is so."""
        for host, cores in zip(self.hosts, self.cores, strict=False):
            if (ranks := self.hosts.count(host)) > cores:
                return f"{ranks} ranks of a host share {count(cores, 'core')}"
        return ""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _versions() -> dict[str, str]:
    found = {
        "convmesh": _torch.VERSION,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["cuDNN"] = str(torch.backends.cudnn.version())
        if dist.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _name(device: torch.device) -> str:
    if device.type != "cpu":
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if named is None else str(named(device))
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {count(torch.get_num_threads(), 'thread')}"
