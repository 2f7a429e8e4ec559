"""Attention over sharded tokens: peak memory of a rank against one process, and the time of keys that go round against
the bare local part plus the bare exchange."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import convmesh
from benchmarks.measure import interleave, timed
from benchmarks.training import returning_memory
from convmesh.comm import Held, rank_line, start
from convmesh.geometry import Interval, Shards
from convmesh.kernels.attention import attend, attend_backward
from convmesh.ops.linalg.attention_blocks import TOKENS, Blocks
from convmesh.process_memory import peak_memory
from tests.harness import Pool

HEADS, WIDTH, RANKS, CORES = 8, 64, 4, 2
# What takes memory grows with the tokens, and time with their square.
REMEMBERED, TIMED = 65_536, 8_192


def add_options(parser: argparse.ArgumentParser) -> None:
    options = parser.add_argument_group("attention")
    options.add_argument("--tokens", type=int, default=REMEMBERED, help="whose memory is measured")


def step(tokens: int, mesh: DeviceMesh | None, causal: bool = False) -> None:
    """Forward and backward of tensors that are made here."""
    ranks = 1 if mesh is None else mesh.size()
    given = [torch.randn(1, HEADS, tokens // ranks, WIDTH) for _ in range(4)]
    if mesh is not None:
        given = [DTensor.from_local(one, mesh, [Shard(TOKENS)], run_check=False) for one in given]
    *inputs, gradient = given
    made = F.scaled_dot_product_attention(*(one.requires_grad_() for one in inputs), is_causal=causal)
    made.backward(gradient)


def memory(mesh: DeviceMesh, tokens: int, alone: bool) -> int:
    """Causal, which takes the memory of all attention in half the time. Memory that ranks share counts once."""
    convmesh.enable()
    torch.set_num_threads(CORES if alone else 1)
    step(512, None if alone else mesh, causal=True)
    before = _of_others()
    peak = peak_memory(lambda: step(tokens, None if alone else mesh, causal=True))
    return peak - (_of_others() - before)


def _of_others() -> int:
    """What the peak counts of shared memory, and is the share of other processes that have it mapped, too."""
    lines = [
        line for name in ("status", "smaps_rollup") for line in Path(f"/proc/self/{name}").read_text().splitlines()
    ]
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return 1024 * (sizes["RssShmem"] - sizes["Pss_Shmem"])


def predicted(tokens: int, ranks: int) -> int:
    """Peak of the tensors of a rank, by a dry run."""

    def build(mesh: DeviceMesh) -> Callable[..., None]:
        convmesh.enable()

        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
            inputs = [one.detach().requires_grad_() for one in (query, key, value)]
            made = F.scaled_dot_product_attention(*inputs, is_causal=True)
            made.backward(torch.randn_like(made))

        return attention

    shape = (1, HEADS, tokens, WIDTH)
    inputs = {name: convmesh.Input(shape) for name in ("query", "key", "value")}
    return convmesh.plan(build, inputs, mesh={"tokens": ranks}, dims={"tokens": TOKENS}).peak


def times(mesh: DeviceMesh, tokens: int, rounds: int) -> dict[str, float]:
    """Of the whole, of a rank's queries with all keys at once, and of all exchanges without anything else."""
    convmesh.enable()
    torch.set_num_threads(1)
    own = tokens // mesh.size()
    query, gradient = (torch.randn(1, HEADS, own, WIDTH) for _ in range(2))
    key, value = (torch.randn(1, HEADS, tokens, WIDTH) for _ in range(2))

    def local() -> None:
        out, total = attend(query, key, value, None, None, False, 0.1)
        attend_backward(gradient, query, key, value, out, total, None, None, False, 0.1)

    shards = Shards(tokens, (mesh.size(),))
    queries = tuple(shards[rank] for rank in range(mesh.size()))
    mine = shards[mesh.get_local_rank(0)]
    blocks = Blocks(queries, shards, mine, Interval(0, tokens), False, rank_line(mesh, (0,)))
    part = torch.randn(1, HEADS, own, WIDTH)

    def exchange() -> None:
        """Keys and values forward, and in backward both, and their gradients."""
        held = [Held.own(part, (TOKENS,), (mine,))] * 2
        schedules = [one.schedule for one in blocks.steps if one.schedule is not None]
        for schedule in schedules:
            start(schedule, held).finish()
        for schedule in schedules:
            arrived = start(schedule, held).finish()
            start(schedule.transposed(), [Held((TOKENS,), tuple(got)) for got in arrived]).finish(accumulate=held)

    processor: dict[str, list[float]] = {"whole": [], "local": [], "exchange": []}

    def alike(name: str) -> float:
        dist.barrier(mesh.get_group(0))
        before = process_time()
        seconds = timed(candidates[name])
        processor[name].append(process_time() - before)
        return seconds

    candidates = {"whole": partial(step, tokens, mesh), "local": local, "exchange": exchange}
    for work in candidates.values():
        work()
    found = interleave({name: partial(alike, name) for name in candidates}, rounds)
    return found | {f"{name}, processor": median(each) for name, each in processor.items()}


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> None:
    """The rows "predicted", "memory" and "time of 2", "time of 4"; the first two for as many tokens as asked for."""
    tokens = options.tokens
    if options.only in "predicted":
        one, rank = (predicted(tokens, ranks) for ranks in (1, RANKS))
        console.print(f"{tokens} tokens, predicted: {one / 2**20:.0f} MiB on one process; a rank of {RANKS}, relative: "
                      f"{rank / one:.2f}")  # fmt: skip
    if options.only in "memory":
        with returning_memory() as other:
            (one,) = other.run(memory, tokens, True, mesh=(1,), timeout=3600)
            rank = max(other.run(memory, tokens, False, mesh=(RANKS,), timeout=3600))
        console.print(f"{tokens} tokens, measured: {one / 2**20:.0f} MiB on one process; a rank of {RANKS}, relative: "
                      f"{rank / one:.2f}")  # fmt: skip
    title = f"{TIMED} tokens: time relative to local part and exchange"
    table = Table("ranks", "time", "of these", "of the processor", "of these", title=title)
    for count in (2, RANKS):
        if options.only not in f"time of {count}":
            continue
        found = pool.run(times, TIMED, max(3, rounds // 2), mesh=(count,), timeout=3600)
        cells = []
        for clock in ("", ", processor"):  # of which the second is right on a busy machine, too
            whole, local, exchange = (
                median(one[f"{name}{clock}"] for one in found) for name in ("whole", "local", "exchange")
            )
            cells += [f"{whole / (local + exchange):.2f}", f"{whole:.2f} s; {local:.2f} and {exchange:.2f} s"]
        table.add_row(str(count), *cells)
    if table.rows:
        console.print(table)
