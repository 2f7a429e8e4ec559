"""The command: starts ranks unless torchrun has, runs all parts on them, and writes the report."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import api
from . import compute, exactness, links, training
from .functions import ALL_FUNCTIONS
from .page import page
from .report import Device, Report
from .terminal import show
from .timing import Stopwatch
from .topology import Place, Topology

TIMEOUT = timedelta(seconds=60)  # after which the others stop waiting for a rank that has failed
T = TypeVar("T")


def run(options: argparse.Namespace) -> int:
    """Return the exit code: 0, or 1 if something is wrong, or 2 for unknown function names."""
    unknown = sorted(set(options.only or ()) - set(ALL_FUNCTIONS))
    if unknown:
        print(f"convmesh selftest: no function {', '.join(unknown)}; there are {', '.join(ALL_FUNCTIONS)}",
              file=sys.stderr)  # fmt: skip
        return 2
    return _as_rank(options) if "RANK" in os.environ else _start(options)


def _start(options: argparse.Namespace) -> int:
    """Start ranks on this machine, as torchrun would."""
    ranks = options.ranks or max(2, torch.accelerator.device_count() if _accelerator() else 0)
    console = Console()
    console.print(f"Starting {ranks} ranks on this machine. On several machines, run this on each of them:")
    console.print("  torchrun --nnodes N --nproc-per-node R --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
                  "-m convmesh selftest", markup=False, soft_wrap=True)  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    selftest = ["-m", "convmesh", "selftest", "--out", str(options.out), *(["--quick"] if options.quick else []),
                *(["--only", *options.only] if options.only else [])]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    environment = {"OMP_NUM_THREADS": threads} | os.environ
    return int(subprocess.run([*torchrun, *selftest], env=environment, check=False).returncode != 0)


def _accelerator() -> str | None:
    """Return the device type of the accelerator, if it has a communication backend of its own."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or dist.get_default_backend_for_device(found) == dist.get_default_backend_for_device("cpu"):
        return None
    return found.type


def _device() -> torch.device:
    """Return this rank's device: one accelerator per rank if the machine has enough, else the CPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    kind = _accelerator()
    if kind is None or torch.accelerator.device_count() < ranks:
        return torch.device("cpu")
    torch.accelerator.set_device_index(local)
    return torch.device(kind, local)


def _as_rank(options: argparse.Namespace) -> int:
    """Run the test as one rank of an existing world, and return the exit code."""
    began, device = time.perf_counter(), _device()
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=TIMEOUT)
    console = Console(quiet=dist.get_rank() != 0)
    # The results of a mesh of two dimensions are summed up along one after the other, which torch advises against.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    report = Report(Topology.of(_told(Place.here(device))))
    if dist.get_world_size() == 1:
        console.print("A self-test of one rank says little: torchrun --nproc-per-node 2 -m convmesh selftest")
    try:
        with api.enable():
            _fill(report, Stopwatch(device, 3 if options.quick else 7), options, console)
    except Exception:
        report.failure = f"rank {dist.get_rank()}: {traceback.format_exc(limit=-4)}"
    report.seconds = time.perf_counter() - began
    if dist.get_rank() == 0:
        _write(report, options, console)
    if not report.failure:  # else other ranks may not get here
        dist.destroy_process_group()
    return int(report.wrong)


def _fill(report: Report, watch: Stopwatch, options: argparse.Namespace, console: Console) -> None:
    """Run each part on all ranks; all of them get everyone's results."""
    ranks, hosts, quick = dist.get_world_size(), report.topology.hosts, options.quick
    line = init_device_mesh(watch.device.type, (ranks,), mesh_dim_names=("h",))
    with console.status("every operator family against one device"):
        report.exactness = _exactness(line, watch.device, options.only or list(ALL_FUNCTIONS))
        report.losses = training.compare_losses(line, watch.device)
    with console.status("arithmetic and memory of the device"):
        local = hosts.count(hosts[dist.get_rank()])
        figures = compute.flops(watch), compute.memory_bandwidth(watch, 2**20 if quick else 2**25)
        report.device = _told(Device(*figures, compute.memory(watch.device, local)))[0]
    large = links.QUICK_LARGE if quick else links.LARGE
    if ranks > 1:
        with console.status("halos between neighbours"):
            found = {link.ranks: link for link in chain(*_told(links.measure_links(watch, hosts, large)))}
            report.links = [found[pair] for pair in sorted(found)]
            report.overlap = min(_told(links.measure_overlap(watch, large)), key=lambda one: one.hidden)
    with console.status("steps of a U-Net"):
        report.host_time = max(_told(training.measure_host_time(watch, ranks)), key=lambda one: one.rank)
        side = training.SMALLEST if quick else training.fitting_side(watch)
        rows = list(chain(*_told(training.measure_scaling(watch, training.numbers_of_ranks(ranks), side))))
        slowest = {row.ranks: row for row in sorted(rows, key=lambda row: row.seconds)}
        report.scaling = [slowest[count] for count in sorted(slowest)]


def _exactness(line: DeviceMesh, device: torch.device, names: Sequence[str]) -> list[exactness.Exactness]:
    """Check on a 1-d mesh, and on a 2-d mesh if there are enough ranks."""
    meshes: list[tuple[DeviceMesh, tuple[int, ...]]] = [(line, (2,))]
    if line.size() % 2 == 0 and line.size() > 2:
        meshes.append((init_device_mesh(device.type, (line.size() // 2, 2), mesh_dim_names=("h", "w")), (2, 3)))
    found: list[exactness.Exactness] = []
    for mesh, dims in meshes:
        for dtype in exactness.DTYPES:
            mine = [exactness.check(name, dtype, mesh, dims, device) for name in names]
            found += [exactness.worst(verdicts) for verdicts in zip(*_told(mine), strict=True)]
    return found


def _told(value: T) -> list[T]:
    """All-gather an object: return every rank's value."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def _write(report: Report, options: argparse.Namespace, console: Console) -> None:
    """Write the report as text, as a page and, if measured, the device's figures."""
    options.out.mkdir(parents=True, exist_ok=True)
    said = show(report, console)
    (options.out / "report.txt").write_text(said, encoding="utf-8")
    (options.out / "report.html").write_text(page(report, said), encoding="utf-8")
    if report.device is not None:
        (options.out / "device.json").write_text(report.device_figures(), encoding="utf-8")
    console.print(f"\nThe page is {options.out / 'report.html'}; for an issue, paste {options.out / 'report.txt'}.",
                  markup=False, soft_wrap=True)  # fmt: skip
