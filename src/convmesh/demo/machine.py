"""The machine and the command that a report was made with."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path

import torch

from .. import _torch
from .report import Report


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def command() -> str:
    """The command line that made the report."""
    options = shlex.join(sys.argv[1:])
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return f"convmesh {options}"
    return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m convmesh {options}"


def facts(report: Report) -> dict[str, str]:
    run, settings = report.runs[report.largest][0], report.settings
    weights = 0 if run.weights is None else run.weights.numel()
    return {
        "Machine": f"{processor()}, {cores()} cores, {platform.system()} {platform.machine()}",
        "Versions": f"convmesh {_torch.VERSION}, torch {torch.__version__}, Python {platform.python_version()}",
        "Ranks": f"{run.device}, {'gloo' if run.device == 'cpu' else 'nccl'}",
        "Network": f"U-Net of {' / '.join(map(str, settings.channels))} channels, {weights:,} weights",
        "Training": f"Adam, {settings.steps} steps, {'float64' if settings.double else 'float32'}, "
        f"noise {settings.noise:g}, seed {settings.seed}",
        "All runs took": f"{report.seconds:.0f} s",
    }
