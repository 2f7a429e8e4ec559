"""Checks that the processes of a mesh compute replicated values with the same bits: same releases, threads, devices."""

from __future__ import annotations

import warnings

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import comm


def compare_settings(mesh: DeviceMesh) -> None:
    """Warn, on all ranks of the mesh, if their settings may let replicated values differ in the last bits."""
    said = comm.of_all_ranks("settings", lambda: _settings(mesh.device_type), mesh)
    if len(said) < 2:
        return
    lines = [f"  ranks {', '.join(map(str, ranks))}: {answer}\n" for answer, ranks in said.items()]
    warnings.warn(
        "the processes of this mesh do not compute alike: replicated values may differ in their last bits, and "
        "replicated parameters drift apart\n"
        + "".join(lines)
        + "  remedy: the same machines, releases and settings for all ranks, such as OMP_NUM_THREADS",
        stacklevel=3,
    )


def _settings(device: str) -> str:
    if device == "cpu":
        units = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    else:
        name = getattr(torch.get_device_module(device), "get_device_name", str)
        units = str(name())
    deterministic = "deterministic" if torch.are_deterministic_algorithms_enabled() else "any"
    return (
        f"torch {torch.__version__}, {units}, float32 products in {torch.get_float32_matmul_precision()} precision, "
        f"{deterministic} algorithms"
    )
