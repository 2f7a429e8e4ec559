"""`make conformance`: PyTorch's own samples of every operator family, sharded, against the dense operator.

Nobody here wrote the cases: they are the OpInfo samples that PyTorch tests its operators with. Each one runs sharded on
each dimension of its input in turn, over 2 and over 4 ranks, forward and backward. What gathers or is refused is on
record (`conformance_record.py`), and a case that does so and is not there fails.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests import conformance_meshes
from tests.conformance_record import Record, digest
from tests.conformance_verdict import FAULTS, LONGER, TELLING_BYTES, VERDICTS, Verdict, judge_all, load
from tests.harness import Pool, RankError
from tests.opinfo import FAMILIES, Case, cases
from tests.simulated import Simulated

RANKS = (2, 4)
BATCH = 60
BATCH_SECONDS, ALONE_SECONDS = 90.0, 20.0

# What is behind it where an operator gathers.
_ZEROS = "zeros that torch's own derivative of it makes, of the full size on every rank; nothing is sent"
_DRAWN = "every rank draws all numbers and keeps its shard, by decision"
GATHERS = {
    "_upsample_bilinear2d_aa": "samples of three rows or columns, each of which reads most of the input",
    "cumprod": _ZEROS,
    "exponential": _DRAWN,
    "matmul": "the gradient of a matrix times a vector is the product of two replicated tensors",
    "max_pool2d_with_indices_backward": _ZEROS,
    "nn.functional.unfold": "samples of five rows, sharded along them: the windows of a row are made together",
    "normal": _DRAWN,
    "slice_scatter": _ZEROS,
    "uniform": _DRAWN,
}


def run(
    pool: Pool | Simulated, family: str, chosen: list[Case], ranks: int, stock: bool = False
) -> Iterator[tuple[Case, Verdict]]:
    """Judge the cases in batches, and one by one where the ranks of a batch do not come to an end together."""

    def verdicts(batch: list[Case], seconds: float) -> list[Verdict]:
        pool.run(load, mesh=(ranks,))
        by_rank = pool.run(judge_all, batch, FAMILIES[family], stock, mesh=(ranks,), timeout=seconds)
        return [max(told, key=lambda verdict: VERDICTS.index(verdict[0])) for told in zip(*by_rank, strict=True)]

    for start in range(0, len(chosen), BATCH):
        batch = chosen[start : start + BATCH]
        try:
            results = verdicts(batch, BATCH_SECONDS)
        except RankError:
            results = []
            for case in batch:
                try:
                    results += verdicts([case], ALONE_SECONDS)
                except RankError as error:
                    results.append(("error", str(error).splitlines()[0]))
        yield from zip(batch, results, strict=True)


@dataclass
class Tally:
    """How many cases of a family came out how, and the same for each of its operators."""

    all: Counter[str] = field(default_factory=Counter)
    by_operator: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)  # why an operator first refused, or gathered

    def add(self, case: Case, verdict: Verdict) -> None:
        self.all[verdict[0]] += 1
        self.by_operator[case.operator][verdict[0]] += 1
        if verdict[1]:
            self.reasons.setdefault((case.operator, verdict[0]), verdict[1].splitlines()[0])


Tallies = dict[str, Tally]


def rows(tallies: Tallies) -> list[list[str]]:
    total: Counter[str] = sum((tally.all for tally in tallies.values()), Counter())
    counted = [*((family, tally.all) for family, tally in tallies.items()), ("all", total)]
    return [[family, *(str(count[verdict]) for verdict in VERDICTS)] for family, count in counted]


def on_screen(tallies: Tallies) -> Table:
    table = Table(title="PyTorch's own samples, sharded on each dimension", title_justify="left")
    for number, heading in enumerate(("family", *VERDICTS)):
        table.add_column(heading, justify="right" if number else "left")
    for row in rows(tallies):
        table.add_row(*row)
    return table


def in_markdown(tallies: Tallies, stock: bool, simulated: bool = False) -> str:
    """The table, and below it which operators gather or refuse, and how often."""
    lines = [
        "# Conformance",
        "",
        "PyTorch's own OpInfo samples, each sharded on each dimension of its input in turn, over 2 and over 4 ranks,",
        "forward and backward, against the dense operator in float64. Made by `python -m tests.conformance --markdown`"
        + (" with `--stock`: torch's DTensor alone." if stock else " on simulated ranks." if simulated else "."),
        f"Of {digest()}.",
        "",
        "A gathered case is right, but some rank made a tensor as large as the largest of one device, or was sent",
        "three quarters of one at once, whatever carried it. Samples with less than two indices a rank, of less than",
        f"{TELLING_BYTES} bytes, or no larger than a replicated operand do not tell. Most samples are so small that",
        "what windows read of a neighbour is all that it has: what seems to be gathered runs once more with an input",
        f"that is {LONGER} times as long in the sharded dimension, where one device takes that, and counts if it still",
        "does.",
        "'Not dense either' are samples that one device refuses, too.",
        "`make conformance` fails if a case that was right is gathered or refused.",
        "",
    ]
    head = ["family", *VERDICTS]
    table = [head, ["---", *["---:"] * len(VERDICTS)], *rows(tallies)]
    lines += [f"| {' | '.join(row)} |" for row in table]
    for verdict, title in (("gathered", "Where it gathers"), ("refused", "What it refuses")):
        found = [
            (operator, count[verdict], sum(count.values()), tally.reasons.get((operator, verdict), ""))
            for tally in tallies.values()
            for operator, count in tally.by_operator.items()
            if count[verdict]
        ]
        if found:
            lines += ["", f"## {title}", ""]
        for operator, some, of, reason in found:
            why = f"{GATHERS[operator]} ({reason})" if verdict == "gathered" and operator in GATHERS else reason
            lines.append(f"- `{operator}`: {some} of {of}: {why}")
    return "\n".join(lines) + "\n" + ("" if stock else conformance_meshes.section())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=100, help="samples of each operator, spread over all (100)")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--operator", action="append", help="only this one, by OpInfo's name; may be repeated")
    parser.add_argument("--show", action="append", default=list(FAULTS), choices=VERDICTS,
                        help="list the cases of this verdict, too")  # fmt: skip
    parser.add_argument("--stock", action="store_true", help="torch's DTensor without this library, for comparison")
    parser.add_argument("--simulated", action="store_true", help="on simulated ranks, in a third of the processor time")
    parser.add_argument("--markdown", type=Path, help="write the result to this file")
    parser.add_argument("--update", action="store_true", help="put what gathers or is refused now on record, and take "
                        "off what no longer does")  # fmt: skip
    parser.add_argument("--mesh", help="only on a mesh of such a shape, for example 2x2x2, of simulated ranks; on "
                        "record, and on the page, is how many cases came out how")  # fmt: skip
    options = parser.parse_args()
    shape = tuple(map(int, options.mesh.split("x"))) if options.mesh else ()
    meshes = (prod(shape),) if shape else RANKS
    chosen = {
        family: [case for case in cases(family, options.most) if case.operator in (options.operator or [case.operator])]
        for family in options.family or FAMILIES
    }
    tallies = {family: Tally() for family, some in chosen.items() if some}
    record, found = Record.load(), Record()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    pools = nullcontext(Simulated(shape)) if shape or options.simulated else Pool()
    with pools as pool, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(map(len, chosen.values())) * len(meshes))
        for family, tally in tallies.items():
            for ranks in meshes:
                progress.update(task, description=f"{family}, {ranks} ranks")
                for case, verdict in run(pool, family, chosen[family], ranks, options.stock):
                    tally.add(case, verdict)
                    found.add(case, ranks, verdict[0])
                    progress.update(task, advance=1)
                    if verdict[0] in options.show:
                        text = " ".join(verdict[1].split())[:400]
                        console.print(f"{verdict[0]}: {case}, {ranks} ranks: {text}", markup=False, soft_wrap=True)
    console.print(on_screen(tallies))
    if options.markdown is not None:
        options.markdown.write_text(in_markdown(tallies, options.stock, options.simulated))
    if options.update and shape:
        counts: Counter[str] = sum((tally.all for tally in tallies.values()), Counter())
        operators = sum(len(tally.by_operator) for tally in tallies.values())
        conformance_meshes.update(options.mesh, options.most, operators, {one: counts[one] for one in VERDICTS})
    elif options.update:
        record.updated(found).save()
    changes = [] if options.stock or options.update or shape else record.changes(found)
    for change in changes:
        console.print(change, markup=False, soft_wrap=True)
    return 1 if changes or any(tally.all[fault] for tally in tallies.values() for fault in FAULTS) else 0


if __name__ == "__main__":
    sys.exit(main())
