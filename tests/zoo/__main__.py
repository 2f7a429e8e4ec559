"""`make zoo`: all networks, or those whose names contain one of the words given, and a page about them."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

from tests.zoo.network import Network
from tests.zoo.page import page
from tests.zoo.registry import FAMILIES, networks, run_named
from tests.zoo.run import Found

MOST_OF_POOL = 12  # networks for each process


def line(found: Found) -> str:
    state = "sharded" if found.sharded else "right" if found.right else "REFUSED" if found.refused else "WRONG"
    where = f"{found.package} {found.name} {found.mesh} {found.dims}"
    if found.refused:
        return f"{state:8} {where}: {found.refused[:300]}"
    return (f"{state:8} {where}: error {found.error:.1e}, largest {found.largest:.2f} ({found.maker[:80]}), "
            f"received {found.received:.2f}, {found.placed}, {found.seconds:.1f} s")  # fmt: skip


def _keep(path: Path, results: list[Found]) -> None:
    """At once: whoever ends this in the middle of it finds what was there before."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps([asdict(one) for one in results], indent=1))
    part.replace(path)


def _jobs(chosen: list[Network], count: int) -> Iterator[Future[list[Found]]]:
    """In processes that end after a while, and with them what libraries keep. Executors whose processes end by
    themselves (`max_tasks_per_child`) hang in Python 3.11."""
    for first in range(0, len(chosen), MOST_OF_POOL * count):
        with ProcessPoolExecutor(count, get_context("spawn")) as pool:
            part = chosen[first : first + MOST_OF_POOL * count]
            yield from as_completed([pool.submit(run_named, one.package, one.name) for one in part])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only networks with one of these in package and name")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only these files of networks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to keep what was found, beside what was found before")
    parser.add_argument("--skip", choices=("known", "sharded"), help="networks that are in that file, or sharded there")
    parser.add_argument("--page", type=Path, help="the page that is written of all of it")
    parser.add_argument("--note", default="", help="what is to be said on the page about this run")
    options = parser.parse_args()
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    results = {(one["package"], one["name"], tuple(one["mesh"]), tuple(one["dims"])): Found(**one) for one in before}
    entries = {(one.package, one.name): one for one in networks([])}
    results = {key: found for key, found in results.items() if key[:2] in entries}  # and not of former entries
    unfinished = {key[:2] for key, found in results.items() if not found.sharded and options.skip == "sharded"}
    done = {key[:2] for key in results} - unfinished if options.skip else set()
    chosen = [one for one in networks(options.words, options.family) if (one.package, one.name) not in done]
    for job in _jobs(chosen, options.jobs):
        of = {(found.package, found.name) for found in job.result()}
        results = {key: found for key, found in results.items() if key[:2] not in of}  # in layouts of before
        for found in job.result():
            results[found.package, found.name, tuple(found.mesh), tuple(found.dims)] = found
            print(line(found), flush=True)
        if options.json:
            _keep(options.json, list(results.values()))
    if options.page:
        options.page.write_text(page(list(results.values()), options.note))
    wrong = [one for one in results.values() if not one.right]
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
