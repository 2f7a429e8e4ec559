"""`make fuzz N=...`: random convolutions against one process. A failure names the seed that repeats it."""

from __future__ import annotations

import argparse
import random
import sys

from rich.progress import track

from tests.cases import MESHES, check, random_case
from tests.harness import Pool, RankError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, help="run only the case of this seed")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(10**9)
    seeds = [options.seed] if options.seed is not None else [first + number for number in range(options.cases)]
    failed = 0
    by_mesh: dict[tuple[int, ...], list[int]] = {mesh: [] for mesh in MESHES}
    for seed in seeds:
        by_mesh[random_case(seed).mesh].append(seed)
    batches = [(mesh, some[i : i + 20]) for mesh, some in by_mesh.items() for i in range(0, len(some), 20)]
    with Pool() as pool:
        for mesh, batch in track(batches, description=f"{len(seeds)} random convolutions"):
            try:
                pool.run_cases(check, [random_case(seed) for seed in batch], mesh=mesh)
                continue
            except RankError:
                pass  # one of them failed: find out which
            for seed in batch:
                try:
                    pool.run(check, random_case(seed), mesh=mesh)
                except RankError as error:
                    failed += 1
                    print(f"\n{error}\n{random_case(seed)}\nrepeat with: make fuzz SEED={seed}", file=sys.stderr)
    print(f"{len(seeds) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
