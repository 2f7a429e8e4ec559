"""`make fuzz N=...`: random convolutions and programs, eager and compiled, against one process.

A failure names its seed. Eager programs run on simulated ranks, of which there may be many.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.progress import track

from tests import cases, programs
from tests.harness import Pool, RankError
from tests.simulated import Simulated

BATCH = 20
MODES = ("eager", "twice", "inference")


@dataclass(frozen=True)
class Kind:
    """Something of which there is a random one for every seed, what checks it on the mesh that it names, and whether
    that may be one of simulated ranks."""

    make: Callable[[int], Any]
    check: Callable[..., None]
    simulated: bool = False


def _program(seed: int) -> programs.Program:
    return programs.random_program(seed, 4 + seed % 5, programs.MESHES + programs.LARGER_MESHES)


def check_program(mesh: Any, program: programs.Program) -> None:
    mode = MODES[len(program.lines) % len(MODES)]
    # torch derives a convolution of no samples twice with plain zeros, which are refused.
    empty = any(0 in leaf.shape for leaf in program.leaves)
    programs.check(mesh, (program, "eager" if empty and mode == "twice" else mode))


def _compiled(seed: int) -> programs.Program:
    return programs.random_program(seed, 3 + seed % 3, compiled=True)


def check_compiled(mesh: Any, program: programs.Program) -> None:
    programs.check(mesh, (program, "compiled"))


KINDS = {
    "convolution": Kind(cases.random_case, cases.check),
    "program": Kind(_program, check_program, simulated=True),
    "compiled": Kind(_compiled, check_compiled),
}


def fuzz(pool: Pool | Simulated, name: str, seeds: list[int]) -> int:
    """How many of these failed."""
    kind, failed = KINDS[name], 0
    made = {seed: kind.make(seed) for seed in seeds}
    by_mesh: dict[tuple[int, ...], list[int]] = {}
    for seed, case in made.items():
        by_mesh.setdefault(case.mesh, []).append(seed)
    batches = [(mesh, some[i : i + BATCH]) for mesh, some in by_mesh.items() for i in range(0, len(some), BATCH)]
    for mesh, batch in track(batches, description=f"{len(seeds)} random {name}s"):
        try:
            pool.run_cases(kind.check, [made[seed] for seed in batch], mesh=mesh)
            continue
        except RankError:
            pass  # one of them failed: find out which
        for seed in batch:
            try:
                pool.run(kind.check, made[seed], mesh=mesh)
            except RankError as error:
                failed += 1
                print(f"\n{error}\n{made[seed]}\nrepeat with: make fuzz KIND={name} SEED={seed}", file=sys.stderr)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, help="run only the case of this seed")
    options = parser.parse_args()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # gathers of several steps, for comparison
    first = random.SystemRandom().randrange(10**9)
    seeds = [options.seed] if options.seed is not None else [first + number for number in range(options.cases)]
    kinds = options.kind or list(KINDS)
    with Pool() as pool:
        failed = sum(fuzz(Simulated() if KINDS[kind].simulated else pool, kind, seeds) for kind in kinds)
    print(f"{len(seeds) * len(kinds) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
