"""The report in the terminal, and the same as plain text to paste into an issue."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from .report import RIGHT, SLOW, WRONG, Report
from .tables import tables

STYLES = {RIGHT: "green", SLOW: "yellow", WRONG: "bold red"}
WIDTH = 100  # columns of the plain text


def show(report: Report, console: Console) -> str:
    """Print the report, and return it as text."""
    written = io.StringIO()
    plain = Console(width=WIDTH, file=written)
    for part in _parts(report):
        console.print(part)
        plain.print(part)
    return written.getvalue()


def _parts(report: Report) -> Iterator[RenderableType]:
    for one in tables(report):
        table = Table(*one.headings, title=one.title, title_justify="left", show_header=any(one.headings))
        for row in one.rows:
            table.add_row(*map(Text, row))
        yield table
    for finding in report.findings():
        yield Text(f"{finding.verdict:5} ", STYLES[finding.verdict]) + Text(finding.text)
