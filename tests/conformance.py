"""`make conformance`: PyTorch's own samples of every operator family, sharded, against the dense operator.

Nobody here wrote the cases: they are the OpInfo samples that PyTorch tests its operators with. Each one runs sharded on
each dimension of its input in turn, over 2 and over 4 ranks, forward and backward. What gathers or is refused is on
record (`conformance_record.py`), and a case that does so and is not there fails.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_map

import convmesh
from convmesh.comm import all_reduce
from tests import conformance_meshes
from tests.cases import place, places_of
from tests.compare import assert_close
from tests.conformance_record import Record, digest
from tests.gathers import Sizes, why_whole
from tests.harness import Pool, RankError
from tests.opinfo import FAMILIES, Case, Family, cases, operators, samples_of, tensors_of
from tests.simulated import Simulated

RANKS = (2, 4)
# From best to worst; a case is as bad as its worst rank. An error is anything but a ShardingError, or a hang.
VERDICTS = ("not dense either", "right", "gathered", "refused", "error", "wrong")
FAULTS = ("error", "wrong")
# Of smaller samples every rank needs most for a result of its own, and so they do not tell whether something is whole.
TELLING_BYTES = 512
# What a window reads of a neighbour stays as large when a tensor is so many times as long, and a gather grows with it.
LONGER = 8
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

Verdict = tuple[str, str]
"""One of VERDICTS, and what there is to say about it."""


Given = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A sample: the input, the other arguments, and those by name."""


def _outputs(fn: Any, sample: Given, change: Any, gradients: Any) -> tuple[list[Any], list[Any], Sizes]:
    """The results and the gradients of all tensors of the sample, each of which `change` has been applied to, and the
    sizes of what was made and sent for them."""
    given = tree_map(lambda t: change(t) if torch.is_tensor(t) else t, sample)
    torch.default_generator.manual_seed(1)
    with Sizes() as sizes:
        results = tensors_of(fn(given[0], *given[1], **given[2]))
    leaves = [t for t in tensors_of(given) if t.requires_grad]
    heads = [t for t in results if t.requires_grad]
    if not heads or not leaves:
        # An operator that returns nothing has written into its input.
        return results or tensors_of(given[0]), [], sizes
    seeds = [gradients(t) for t in heads]
    with sizes:
        found = torch.autograd.grad(heads, leaves, seeds, allow_unused=True)
    return results, list(found), sizes


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, like.numel(), dtype=like.dtype).reshape(like.shape)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@lru_cache(maxsize=4)
def _dense(operator: str, variant: str, in_place: bool, number: int, longer: int | None) -> Any:
    """A sample, and what one device makes of it; the error's text of those that are made to be refused by the operator.

    The input, and what has its shape, may be `longer` in that dimension.
    """
    fn, samples = samples_of(operator, variant, in_place)
    given: Given = (samples[number].input, samples[number].args, samples[number].kwargs)
    try:
        if longer is not None:
            given = _longer(given, longer)
        return given, _outputs(fn, given, _fresh, _numbers)
    except Exception as error:
        return given, str(error)


def _longer(given: Given, dim: int) -> Given:
    shapes = {t.shape for t in tensors_of(given[0])}

    def changed(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or leaf.shape not in shapes:
            return leaf
        return torch.cat([leaf.detach()] * LONGER, dim).requires_grad_(leaf.requires_grad)

    longer: Given = tree_map(changed, given)
    return longer


def judge(mesh: DeviceMesh, case: Case, family: Family, longer: int | None = None) -> Verdict:
    """This rank's verdict on a case, whose input may be `longer` in a dimension."""
    sample, dense = _dense(case.operator, case.variant, case.in_place, case.sample, longer)
    if isinstance(dense, str):
        return "not dense either", dense
    inputs = tensors_of(sample[0])
    shapes = {t.shape for t in inputs if t.dim() > case.dim}
    own = {id(t) for t in inputs}

    def is_cut(t: torch.Tensor) -> bool:
        return t.shape in shapes and (id(t) in own or not family.alone)

    def sharded(t: torch.Tensor) -> torch.Tensor:
        # Further mesh dimensions shard the dimensions that follow.
        at = [(case.dim + further) % t.dim() if is_cut(t) else "R" for further in range(mesh.ndim)]
        return place(t.detach().clone(), mesh, tuple(at)).requires_grad_(t.requires_grad)

    def gradient(t: torch.Tensor) -> torch.Tensor:
        # As DTensor gives it: the gradient of a pending sum is the same for all of its terms.
        at = tuple("R" if p == "P" else p for p in places_of(t))  # type: ignore[arg-type]
        return place(_numbers(torch.empty(t.shape, dtype=t.dtype)), mesh, at)

    try:
        results = _outputs(samples_of(case.operator, case.variant, case.in_place)[0], sample, sharded, gradient)
    except convmesh.ShardingError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    try:
        for mine, wanted in zip([*results[0], *results[1]], [*dense[0], *dense[1]], strict=True):
            _compare(mine, wanted, family.elementwise)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    replicated = [t for t in tensors_of(sample) if not is_cut(t)]
    why = _gathered(mesh, case.dim, inputs, replicated, dense[2], results[2])
    return ("gathered", why) if why else ("right", "")


def judge_twice(mesh: DeviceMesh, case: Case, family: Family) -> Verdict:
    """What any rank takes for gathered, all of them judge once more, with a longer input if one device takes that."""
    verdict = judge(mesh, case, family)
    if not all_reduce(torch.tensor(float(verdict[0] == "gathered")), mesh, range(mesh.ndim), "max"):
        return verdict
    again = judge(mesh, case, family, case.dim)
    return verdict if again[0] == "not dense either" else again


def _gathered(
    mesh: DeviceMesh, dim: int, inputs: list[torch.Tensor], replicated: list[torch.Tensor], one: Sizes, many: Sizes
) -> str:
    """How this rank has made a tensor as large as the largest of one device, or got most of one at once; empty if not.

    Of replicated tensors, such as parameters, each rank has the gradient too.
    """
    size = max((t.shape[dim] for t in inputs if t.dim() > dim), default=0)
    given = max((t.nbytes for t in inputs), default=0)
    beside = max((_padded(t, mesh.size()) for t in replicated), default=0)
    if size < 2 * mesh.size() or given < TELLING_BYTES or given <= beside:
        return ""
    return why_whole(one, many, *inputs)


def _padded(tensor: torch.Tensor, ranks: int) -> int:
    """How many bytes a gathered tensor has: as torch pads parts of one length."""
    parts = [tensor.nbytes // max(1, size) * -(-size // ranks) * ranks for size in tensor.shape]
    return max([tensor.nbytes, *parts])


def _compare(actual: Any, expected: torch.Tensor | None, elementwise: bool) -> None:
    """This rank's part with what it should be. A gradient that is missing is one of zeros."""
    if actual is None and expected is None:
        return
    if not isinstance(actual, DTensor):
        like = expected if actual is None else actual
        zeros = torch.zeros_like(like)  # type: ignore[arg-type]
        assert_close(zeros if actual is None else actual, zeros if expected is None else expected)
        return
    expected = torch.zeros(actual.shape, dtype=actual.dtype) if expected is None else expected.detach()
    # The samples and the gradients that we give are numbers of about 1: what is far below it is what has cancelled.
    scale = max([1.0, *expected[expected.isfinite()].double().abs().tolist()])
    if any(isinstance(p, Partial) for p in actual.placements):
        assert_close(actual.detach().full_tensor(), expected, scale, elementwise)
        return
    wanted = place(expected, actual.device_mesh, places_of(actual)).to_local()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert_close(actual.detach().to_local(), wanted, scale, elementwise)


def judge_all(mesh: DeviceMesh, batch: list[Case], family: Family, stock: bool) -> list[Verdict]:
    with warnings.catch_warnings(), nullcontext() if stock else convmesh.enable():
        warnings.simplefilter("ignore")
        return [judge_twice(mesh, case, family) for case in batch]


def load(mesh: DeviceMesh) -> None:
    """New processes take their time to import all samples, which is not to count against a case."""
    operators()


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
