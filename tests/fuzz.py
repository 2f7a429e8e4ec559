"""`make fuzz N=...`: random convolutions and random programs against one process. A failure names its seed."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.progress import track

from tests import cases, programs
from tests.harness import Pool, RankError

BATCH = 20
MODES = ("eager", "twice", "inference")  # compiled code has random numbers of its own


@dataclass(frozen=True)
class Kind:
    """Something of which there is a random one for every seed, and what checks it on the mesh that it names."""

    make: Callable[[int], Any]
    check: Callable[..., None]


def _program(seed: int) -> programs.Program:
    return programs.random_program(seed, length=4 + seed % 5)


def check_program(mesh: Any, program: programs.Program) -> None:
    programs.check(mesh, (program, MODES[len(program.lines) % len(MODES)]))


KINDS = {"convolution": Kind(cases.random_case, cases.check), "program": Kind(_program, check_program)}


def fuzz(pool: Pool, name: str, seeds: list[int]) -> int:
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
    first = random.SystemRandom().randrange(10**9)
    seeds = [options.seed] if options.seed is not None else [first + number for number in range(options.cases)]
    kinds = options.kind or list(KINDS)
    with Pool() as pool:
        failed = sum(fuzz(pool, kind, seeds) for kind in kinds)
    print(f"{len(seeds) * len(kinds) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
