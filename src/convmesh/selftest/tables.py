"""The results of a self-test as tables, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..report.words import number
from .report import Report


@dataclass(frozen=True)
class Numbers:
    """A table."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def tables(report: Report) -> Iterator[Numbers]:
    """Yield the tables of what was measured."""
    yield Numbers("Where", ("", ""), list(_where(report)))
    families = [
        (name, ", ".join(dict.fromkeys(one.function for one in checks)), _parts(max(one.error for one in checks)))
        for name, checks in report.families().items()
    ]
    if families:
        yield Numbers("Exactness", ("operator family", "functions", "error / allowed"), families)
    if report.device is not None:
        found = [
            (f"products of {dtype}", f"{number(value / 1e12)} TFLOP/s") for dtype, value in report.device.flops.items()
        ]
        bandwidth, memory = report.device.memory_bandwidth / 1e9, report.device.memory / 1e9
        found.append(("memory", f"{number(bandwidth)} GB/s of {number(memory)} GB"))
        yield Numbers("Device", ("", ""), found)
    if report.links:
        links = [
            (f"{link.ranks[0]} - {link.ranks[1]}", "two hosts" if link.between_hosts else "one host",
             number(link.latency * 1e6), number(link.bandwidth / 1e9))
            for link in report.shown_links()
        ]  # fmt: skip
        some = f" ({len(links)} of {len(report.links)})" if len(links) < len(report.links) else ""
        yield Numbers(f"Halos between neighbours{some}", ("ranks", "on", "latency (us)", "GB/s"), links)
    if report.overlap is not None:
        ms = [number(seconds * 1e3) for seconds in (report.overlap.exchange, report.overlap.work, report.overlap.both)]
        row = (*ms, f"{report.overlap.hidden:.0%}")
        yield Numbers("Overlap", ("exchange alone (ms)", "work alone (ms)", "both at once (ms)", "hidden"), [row])
    if report.host_time is not None:
        one, rank = report.host_time.one, report.host_time.rank
        row = (number(one * 1e3), number(rank * 1e3), f"{rank / one:.1f}")
        yield Numbers("Host time of a small U-Net step", ("plain (ms)", "sharded (ms)", "ratio"), [row])
    if report.scaling:
        steps = [
            (str(row.ranks), number(row.seconds * 1e3), f"{report.scaling[0].seconds / row.seconds:.2f}",
             f"{report.efficiency(row):.0%}", f"{row.waiting:.0%}")
            for row in report.scaling
        ]  # fmt: skip
        side = report.scaling[0].side
        headings = ("ranks", "ms", "speed-up", "efficiency", "waiting")
        yield Numbers(f"A U-Net step of a {side} x {side} picture", headings, steps)


def _parts(error: float) -> str:
    return f"{error:.2f}" if error < 1000 else f"{error:.1e}"


def _where(report: Report) -> Iterator[tuple[str, str]]:
    yield "ranks", report.topology.summary
    yield "versions", ", ".join(f"{name} {version}" for name, version in report.topology.versions.items())
    yield "settings", ", ".join(f"{name}={value}" for name, value in report.topology.settings.items()) or "none"
    yield "the test took", f"{report.seconds:.0f} s"
