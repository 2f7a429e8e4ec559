"""`python -m tests.planner.against_runs [NETWORK ...]`: plans of eight networks against runs of them on 1, 2, 4 and 8
ranks, the table of docs/plan.md. `make test` has some of its cases, with smaller inputs."""

from __future__ import annotations

import ctypes
import gc
import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import convmesh
from benchmarks.training import returning_memory
from convmesh.planner.dry_run import STEPS, dry_run, silent_world, traced
from convmesh.planner.memory import memory_of
from convmesh.planner.problem import SPATIAL, Problem, problem, words
from convmesh.planner.trace import Send, Use
from convmesh.process_memory import peak_memory
from tests.harness import Pool
from tests.planner.networks import NETWORKS

OF_EIGHT = {2: {"h": 4, "w": 2}, 3: {"d": 2, "h": 2, "w": 2}}  # by spatial dimensions


def meshes(name: str) -> list[dict[str, int]]:
    """Of 1, 2, 4 and 8 ranks."""
    return [{"h": 1}, {"h": 2}, {"h": 2, "w": 2}, OF_EIGHT[len(NETWORKS[name].small) - 2]]


WITH_SEQUENCES = ("unet2d", "unet3d", "resnet50", "convnext", "segresnet")  # of layers, that can be checkpointed


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
    large: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """A large input is as large on each rank."""
        network = NETWORKS[self.name]
        names = ("", "", *SPATIAL[len(network.small) - 2])
        grown = tuple(size * self.mesh.get(name, 1) for size, name in zip(network.of_rank, names, strict=True))
        return grown if self.large else network.small

    def problem(self) -> Problem:
        network = NETWORKS[self.name]
        model = network.make() if self.large else network.narrow()
        if self.checkpoints:
            model = with_checkpoints(model)
        return problem(model, {"x": self.shape}, None, "adamw", self.precision)


@dataclass(frozen=True)
class Counts:
    """Of a rank in some steps: exchanges and bytes sent in them; and in the last, the peak of all its tensors."""

    exchanges: int
    bytes_sent: int
    peak: int


def counted(mesh: DeviceMesh, case: Case) -> Counts:
    return counts(mesh, case.problem(), STEPS)


def counts(mesh: DeviceMesh, asked: Problem, steps: int) -> Counts:
    """In a run with numbers."""
    with convmesh.count_traffic() as traffic:
        trace = traced(asked, mesh, steps=steps)
    return Counts(traffic.exchanges, traffic.bytes_sent, memory_of(trace).peak.total)


def resident(mesh: DeviceMesh, case: Case) -> int:
    """By how many bytes this process grows, which has run the same before."""
    asked = case.problem()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)

    def steps() -> None:
        step, inputs = asked.step(mesh), asked.tensors(mesh)
        for _ in range(2):
            step(**inputs)

    return peak_memory(steps)


def planned(case: Case, rank: int, steps: int = STEPS) -> Counts:
    """Of a plan."""
    with silent_world():
        trace = dry_run(case.problem(), case.mesh, rank, steps=steps)
    halos = [event for event in trace.events if isinstance(event, Send) and event.use is Use.HALO]
    return Counts(len(halos), sum(event.bytes for event in halos), memory_of(trace).peak.total)


def simulated(case: Case, steps: int) -> list[Counts]:
    asked = case.problem()
    return convmesh.simulate(lambda mesh: counts(mesh, asked, steps), tuple(case.mesh.values()), tuple(case.mesh))


def on_processes(pool: Pool, case: Case) -> list[Counts]:
    return pool.run(counted, case, mesh=tuple(case.mesh.values()), names=tuple(case.mesh), timeout=600)


def differences(runs: list[Counts], plans: list[Counts]) -> tuple[bool, float]:
    """(whether exchanges and bytes are the same on all ranks, the largest relative difference of a peak)"""
    pairs = list(zip(runs, plans, strict=True))
    same = all((run.exchanges, run.bytes_sent) == (plan.exchanges, plan.bytes_sent) for run, plan in pairs)
    return same, max(abs(plan.peak / run.peak - 1) for run, plan in pairs)


def cases(name: str) -> list[Case]:
    more = [Case(name, {"h": 2}, "bf16", large=True)]
    if name in WITH_SEQUENCES:
        more += [Case(name, {"h": 2}, precision, checkpoints=True, large=True) for precision in ("fp32", "bf16")]
    return [Case(name, mesh, large=True) for mesh in meshes(name)] + more


def compared(pool: Pool, case: Case) -> bool:
    """Prints a row, and says whether it is as it should be. Peaks are of the rank that is farthest from its plan."""
    on = {"mesh": tuple(case.mesh.values()), "names": tuple(case.mesh), "timeout": 600}
    runs, held = pool.run(counted, case, **on), pool.run(resident, case, **on)
    plans = [planned(case, rank) for rank in range(len(runs))]
    same, tracked = differences(runs, plans)
    at = max(range(len(runs)), key=lambda rank: abs(plans[rank].peak / held[rank] - 1))
    beside = plans[at].peak / held[at] - 1
    how = ", ".join(["checkpoints"] * case.checkpoints + [case.precision] * (case.precision != "fp32"))
    cells = (
        f"{case.name}, {' x '.join(map(str, case.shape))}", words(case.mesh), how,
        f"{plans[0].exchanges:,}", f"{plans[0].bytes_sent:,}", "equal" if same else "**differ**",
        f"{plans[at].peak / 1e6:.0f}", f"{runs[at].peak / 1e6:.0f}", f"{tracked:.1%}", f"{held[at] / 1e6:.0f}",
        f"{beside:+.1%}",
    )  # fmt: skip
    print(f"| {' | '.join(cells)} |", flush=True)
    return same and tracked <= 0.05 and abs(beside) <= 0.1


def main(names: list[str]) -> int:
    print("| network and input | mesh | | exchanges | bytes | in the run | planned peak, MB | tracked | apart "
          "| resident set | apart |\n|" + "---|" * 11)  # fmt: skip
    wrong = 0
    with returning_memory(8) as pool:
        for case in [case for name in names for case in cases(name)]:
            wrong += not compared(pool, case)
    print(f"{wrong} rows are not as they should be")
    return wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(min(main(sys.argv[1:] or list(NETWORKS)), 1))
