"""Formatting numbers for people."""

from __future__ import annotations

from math import floor, log10

TIMES, DASH, MINUS = "\N{MULTIPLICATION SIGN}", "\N{EN DASH}", "\N{MINUS SIGN}"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def number(value: float) -> str:
    """Format to three significant digits, without an exponent: `0.00123`, `12.3`, `1,235`."""
    digits = 2 - floor(log10(value)) if value > 0 else 0
    return f"{value:,.{max(0, digits)}f}"


def size(count: float) -> str:
    """Format a number of bytes: `1.23 MB`."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count /= 1000
        unit += 1
    digits = 0 if unit == 0 or count <= 0 else max(0, 2 - int(log10(count)))  # three significant ones
    return f"{count:.{digits}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format seconds: `1.23 s`, `12.3 ms`, `123 µs`."""
    if not seconds:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        value = seconds * factor
        if value >= 1 or unit == "µs":
            return f"{value:.{max(0, 2 - int(log10(max(value, 1))))}f} {unit}"
    raise AssertionError


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
