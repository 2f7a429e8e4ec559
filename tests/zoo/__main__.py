"""`make zoo`: all networks, or those whose names contain one of the words given, and a page about them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.zoo.page import page, read
from tests.zoo.registry import FAMILIES, networks, run_named
from tests.zoo.run import Found
from tests.zoo.workers import call_all


def line(found: Found) -> str:
    state = "sharded" if found.sharded else "right" if found.right else "REFUSED" if found.refused else "WRONG"
    where = f"{found.package} {found.name} {found.mesh} {found.dims}"
    if found.refused:
        return f"{state:8} {where}: {found.refused[:300]}"
    return (f"{state:8} {where}: error {found.error:.1e}, largest {found.largest:.2f} ({found.maker[:80]}), "
            f"received {found.received:.2f}, {found.placed}, {found.seconds:.1f} s")  # fmt: skip


def _known(path: Path | None) -> list[Found]:
    """What a page says of entries that there still are."""
    entries = {(one.package, one.name) for one in networks([])}
    found = read(path.read_text()) if path and path.exists() else []
    return [one for one in found if (one.package, one.name) in entries]


def _keep(path: Path, found: list[Found]) -> None:
    """At once, beside what others have written meanwhile: whoever ends this in the middle of it finds all of that."""
    names = {(one.package, one.name) for one in found}
    others = [one for one in _known(path) if (one.package, one.name) not in names]
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(page(others + found))
    part.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only networks with one of these in package and name")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only these files of networks")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=900, help="seconds that a network may take")
    parser.add_argument("--page", type=Path, help="the page that is written of what is found, and what it had before")
    parser.add_argument("--skip", choices=("known", "sharded"), help="networks that are on that page, or sharded there")
    options = parser.parse_args()
    known = _known(options.page)
    unfinished = {(one.package, one.name) for one in known if not one.sharded and options.skip == "sharded"}
    done = {(one.package, one.name) for one in known} - unfinished if options.skip else set()
    chosen = [(one.package, one.name) for one in networks(options.words, options.family)]
    chosen = [name for name in chosen if name not in done]
    wrong = 0
    for name, returned in call_all(run_named, chosen, options.jobs, options.limit):
        found = [Found(*name, (), (), refused=str(returned))] if isinstance(returned, Exception) else returned
        for one in found:
            print(line(one), flush=True)
            wrong += not one.right
        if options.page:
            _keep(options.page, found)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
