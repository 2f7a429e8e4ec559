"""The command line: `convmesh <command>`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import groupby

from . import ops as ops  # declares the rules
from .demo.options import add_options
from .planner import command as planning
from .selftest.options import add_options as add_selftest_options
from .sharding.registry import Behaviour, declared

HEADINGS = ("operator", "stays sharded", "communication", "refused")
INTRODUCTION = """\
# Operators

What each operator does on sharded tensors after `convmesh.enable()`, forward and backward. Made from the rules
themselves by `convmesh operators --markdown`. Operators that are not listed here run as torch's DTensor runs them.

*Stays sharded* names the dimensions that may be sharded, and are sharded in the result, and the Partial placements that
may stay; operands with other placements are redistributed first. *Communication* is what ranks send each other beyond
that. An element *changes owner* if another rank's shard contains it after the operator than before. *Refused* raises a
`ShardingError`; "-" means nothing does.
"""

Row = tuple[str, Behaviour]


def operator_rows() -> list[Row]:
    """Return (operators with the same behaviour, the behaviour), sorted by family and name."""
    alike: dict[tuple[str, Behaviour], set[str]] = {}
    for operator, behaviour in declared().items():
        name = operator._schema.name.removeprefix("aten::")
        alike.setdefault((name, behaviour), set()).add(operator._overloadname)
    by_behaviour: dict[Behaviour, list[str]] = {}
    for name, behaviour in sorted(alike, key=lambda entry: entry[0]):
        by_behaviour.setdefault(behaviour, []).append(name)
    rows = [(", ".join(dict.fromkeys(names)), behaviour) for behaviour, names in by_behaviour.items()]
    return sorted(rows, key=lambda row: (row[1].family, row[0]))


def families(rows: Iterable[Row]) -> Iterable[tuple[str, list[Row]]]:
    for family, members in groupby(rows, key=lambda row: row[1].family):
        yield family, list(members)


def cells(row: Row) -> tuple[str, ...]:
    names, behaviour = row
    return names, behaviour.stays, behaviour.communication, behaviour.refused


def markdown() -> str:
    """Return the page docs/operators.md."""
    lines = [INTRODUCTION]
    for family, rows in families(operator_rows()):
        lines += [f"## {family.capitalize()}", "", _line(HEADINGS), _line(["---"] * len(HEADINGS))]
        for row in rows:
            names, *rest = (cell.replace("|", "\\|") for cell in cells(row))
            lines.append(_line([", ".join(f"`{name}`" for name in names.split(", ")), *rest]))
        lines.append("")
    return "\n".join(lines)


def _line(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def show_operators(options: argparse.Namespace) -> int:
    if options.markdown:
        print(markdown(), end="")
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False)
    for family, rows in families(operator_rows()):
        table = Table(*HEADINGS, title=family.capitalize(), title_justify="left", show_lines=True)
        for row in rows:
            table.add_row(*cells(row))
        console.print(table)
    return 0


def run_demo(options: argparse.Namespace) -> int:
    from .demo.command import run

    return run(options)


def run_selftest(options: argparse.Namespace) -> int:
    from .selftest.command import run

    return run(options)


def parser() -> argparse.ArgumentParser:
    """Return the argument parser; each command is a subparser with its function as `run`."""
    main_parser = argparse.ArgumentParser(prog="convmesh", description="Convolutional networks on a device mesh.")
    commands = main_parser.add_subparsers(title="commands", required=True, metavar="command")
    operators = commands.add_parser("operators", help="what each operator does on sharded tensors")
    operators.add_argument("--markdown", action="store_true", help="as the page of the documentation")
    operators.set_defaults(run=show_operators)
    show = commands.add_parser(
        "demo", help="train on local ranks and on one process, and make a page that compares them"
    )
    add_options(show)
    show.set_defaults(run=run_demo)
    selftest = commands.add_parser(
        "selftest", help="whether all operator families are right on this hardware, and how fast their parts are"
    )
    add_selftest_options(selftest)
    selftest.set_defaults(run=run_selftest)
    plan = commands.add_parser("plan", help="memory, traffic and time of a model on a mesh, without the hardware")
    planning.add_options(plan)
    plan.set_defaults(run=planning.run)
    return main_parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "jinja2"):
            raise
        extra = "demo" if options.run is run_demo else "cli"
        print(f"This command needs {error.name}: pip install 'convmesh[{extra}]'", file=sys.stderr)
        return 1
    return status
