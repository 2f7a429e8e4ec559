"""The HTML page: findings, charts, and the text for an issue."""

from __future__ import annotations

from markupsafe import Markup

from ..report.charts import bars
from ..report.page import render
from ..report.words import duration, number
from .report import Report
from .tables import tables


def page(report: Report, text: str) -> str:
    """Render the page; `text` is what the terminal shows."""
    return render(
        __package__, "selftest.html", report=report, findings=report.findings(), tables=list(tables(report)), text=text,
        pictures=_pictures(report),
    )  # fmt: skip


def _pictures(report: Report) -> list[tuple[str, Markup]]:
    """Return (title, chart) pairs of what was measured."""
    found = []
    if report.scaling:
        steps = [(f"{row.ranks} rank{'s' if row.ranks > 1 else ''}", row.seconds, duration(row.seconds),
                  "var(--two)") for row in report.scaling]  # fmt: skip
        found.append(("A step of a U-Net", bars(steps)))
    if report.links:
        links = [(f"ranks {link.ranks[0]} and {link.ranks[1]}{', two hosts' * link.between_hosts}", link.bandwidth,
                  f"{number(link.bandwidth / 1e9)} GB/s", "var(--four)" if link.between_hosts else "var(--two)")
                 for link in report.shown_links()]  # fmt: skip
        some = f": the slowest, the median and the fastest of {len(report.links)}" * (len(links) < len(report.links))
        found.append((f"Bytes a second between neighbours{some}", bars(links)))
    if report.overlap is not None:
        parts = {
            "exchange alone": report.overlap.exchange,
            "work alone": report.overlap.work,
            "both": report.overlap.both,
        }
        rows = [(name, seconds, duration(seconds), "var(--six)") for name, seconds in parts.items()]
        found.append(("An exchange behind work", bars(rows)))
    return found
