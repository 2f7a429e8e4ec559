"""`python -m tests.planner.against_runs`: plans of eight networks against runs of them on 1, 2, 4 and 8 ranks, the
table of docs/plan.md. `make test` has some of its cases."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import convmesh
from benchmarks.training import returning_memory
from convmesh.planner.dry_run import dry_run, silent_world, traced
from convmesh.planner.memory import memory_of
from convmesh.planner.problem import Problem, problem, words
from convmesh.planner.trace import Send, Trace, Use
from convmesh.process_memory import peak_memory
from tests.harness import Pool
from tests.planner.networks import NETWORKS

MESHES: tuple[dict[str, int], ...] = ({"h": 1}, {"h": 2}, {"h": 2, "w": 2})
LARGE = {"unet2d": 6, "unet3d": 3, "resnet50": 4, "convnext": 4}
OF_EIGHT = {2: {"h": 4, "w": 2}, 3: {"d": 2, "h": 2, "w": 2}}  # by spatial dimensions


class Checkpointed(nn.Module):
    """A block whose activations are computed once more in the backward pass."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)  # type: ignore[assignment]
        return made


def with_checkpoints(model: nn.Module) -> nn.Module:
    """All of a model's sequences of layers, the outermost."""
    for name, block in list(model.named_children()):
        if isinstance(block, nn.Sequential):
            setattr(model, name, Checkpointed(block))
        else:
            with_checkpoints(block)
    return model


@dataclass(frozen=True)
class Case:
    name: str
    mesh: dict[str, int]
    precision: str = "fp32"
    checkpoints: bool = False
    larger: int = 1  # so many times the size along each spatial dimension

    def problem(self) -> Problem:
        make, shape = NETWORKS[self.name]
        model = with_checkpoints(make()) if self.checkpoints else make()
        sizes = shape[:2] + tuple(size * self.larger for size in shape[2:])
        return problem(model, {"x": sizes}, None, "adamw", self.precision)


@dataclass(frozen=True)
class Counts:
    """Of a rank: exchanges and bytes in them of all steps, the peak of all its tensors, and of its resident set."""

    exchanges: int
    bytes_sent: int
    peak: int
    resident: int = 0


def counted(mesh: DeviceMesh, case: Case) -> Counts:
    """In a run with numbers."""
    traces: list[Trace] = []
    with convmesh.count_traffic() as traffic:
        resident = peak_memory(lambda: traces.append(traced(case.problem(), mesh)))
    return Counts(traffic.exchanges, traffic.bytes_sent, memory_of(traces[0]).peak.total, resident)


def planned(case: Case, rank: int) -> Counts:
    """Of a plan."""
    with silent_world():
        trace = dry_run(case.problem(), case.mesh, rank)
    halos = [event for event in trace.events if isinstance(event, Send) and event.use is Use.HALO]
    return Counts(len(halos), sum(event.bytes for event in halos), memory_of(trace).peak.total)


def simulated(case: Case) -> list[Counts]:
    return convmesh.simulate(lambda mesh: counted(mesh, case), tuple(case.mesh.values()), tuple(case.mesh))


def on_processes(pool: Pool, case: Case) -> list[Counts]:
    return pool.run(counted, case, mesh=tuple(case.mesh.values()), names=tuple(case.mesh), timeout=600)


def differences(case: Case, runs: list[Counts], ranks: list[int] | None = None) -> tuple[bool, float]:
    """(whether exchanges and bytes are the same on all ranks, the largest relative difference of a peak)"""
    same, apart = True, 0.0
    for rank in ranks or range(len(runs)):
        plan = planned(case, rank)
        same &= (plan.exchanges, plan.bytes_sent) == (runs[rank].exchanges, runs[rank].bytes_sent)
        apart = max(apart, abs(plan.peak / runs[rank].peak - 1))
    return same, apart


def cases() -> list[Case]:
    found = [Case(name, mesh) for name in NETWORKS for mesh in MESHES]
    found += [Case(name, OF_EIGHT[len(shape) - 2]) for name, (_, shape) in NETWORKS.items()]
    found += [Case(name, MESHES[1], precision="bf16") for name in NETWORKS]
    found += [Case(name, MESHES[1], checkpoints=True) for name in ("unet2d", "unet3d", "resnet50", "segresnet")]
    return found


def resident() -> None:
    """At sizes at which activations dominate, in processes that give back what they free."""
    print("\n| network | mesh | planned peak | tracked | resident set |\n|---|---|---|---|---|")
    with returning_memory() as pool:
        for name, larger in LARGE.items():
            for mesh in MESHES:
                case = Case(name, mesh, larger=larger)
                run, plan = on_processes(pool, case)[0], planned(case, 0)
                figures = " | ".join(f"{bytes / 1e6:.0f} MB" for bytes in (plan.peak, run.peak, run.resident))
                print(f"| {name} | {words(mesh)} | {figures} |", flush=True)


def main() -> int:
    wrong = 0
    print("| network | mesh | | exchanges and bytes | peak apart |\n|---|---|---|---|---|")
    with Pool() as pool:
        for case in cases():
            runs = simulated(case) if prod(case.mesh.values()) > 4 else on_processes(pool, case)
            same, apart = differences(case, runs)
            wrong += not same or apart > 0.05
            how = "checkpoints" if case.checkpoints else "" if case.precision == "fp32" else case.precision
            print(
                f"| {case.name} | {words(case.mesh)} | {how} | {'equal' if same else '**differ**'} | {apart:.1%} |",
                flush=True,
            )
    resident()
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
