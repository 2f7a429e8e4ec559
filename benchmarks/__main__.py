"""`make bench`: the figures of docs/benchmarks.md, measured here and now."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks import (
    attention,
    batching,
    checks,
    compiled,
    convolution,
    dry_runs,
    host,
    large_meshes,
    operators,
    plan,
    privacy,
    training,
    vae,
)
from tests.harness import Pool

SUITES = {
    "convolution": convolution.run,
    "operators": operators.run,
    "batching": batching.run,
    "privacy": privacy.run,
    "training": training.run,
    "checks": checks.run,
    "large_meshes": large_meshes.run,
    "dry_runs": dry_runs.run,
    "host": host.run,
    "plan": plan.run,
    "attention": attention.run,
    "compiled": compiled.run,
    "vae": vae.run,
}
BY_ROWS = ("attention", "batching", "compiled", "plan", "privacy", "vae")  # which take the options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suites", nargs="*", default=list(SUITES), help=f"any of {', '.join(SUITES)}")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds; medians are reported")
    batching.add_options(parser)
    attention.add_options(parser)
    options = parser.parse_args()
    console = Console(width=160)
    with Pool(stays_enabled=True) as pool:
        for name in options.suites:
            rows = {"options": options} if name in BY_ROWS else {}
            SUITES[name](pool, console, options.rounds, **rows)


if __name__ == "__main__":
    main()
