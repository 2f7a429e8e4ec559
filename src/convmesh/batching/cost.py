"""What an algorithm costs, estimated: seconds as a sum of a few features of the task, each with a measured price."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from math import isfinite, prod
from pathlib import Path
from typing import NamedTuple

from ..user_cache import cache_directory, make_private
from .algorithms import Algorithm, Task
from .contraction import FACTORS, Role
from .memory import GIVEN_BACK

log = logging.getLogger("convmesh.batching")


class Features(NamedTuple):
    """What is paid for. One price for each, per algorithm and kind of task."""

    calls: float  # of operators, millions
    flops: float  # 10 ** 12
    activations: float  # gigabytes of images and responses
    kernels: float  # gigabytes
    traffic: float  # gigabytes written beside them
    patches: float = 0.0  # gigabytes that the taps of a kernel see: where libraries have no better way, they write them


# What the built-in table was measured for. Other kinds of numbers and devices are scaled from it.
MEASURED = "cpu/float32/n"
# A sum of products takes this many times as long as in float32, beyond what the bytes say: vectors hold half as many.
SLOWER = {"float64": 2.0, "complex64": 4.0, "complex128": 8.0}
# A device of another kind computes much faster, and takes this many microseconds to be told.
FASTER, LAUNCH = 50.0, 10.0

# Seconds for a byte of memory that the process gets anew.
FIRST_TOUCH = 0.3e-9
# Seconds for a byte of an operand that is copied when it is folded.
FOLDED = 0.13e-9


@dataclass(frozen=True)
class PriceTable:
    """Prices by `key_of`; `source` says where they come from, for those who ask why."""

    source: str
    prices: Mapping[str, Features]

    def seconds(self, algorithm: Algorithm, task: Task) -> float | None:
        """None where nobody measured this kind of task."""
        measured = self.measured_for(task)
        price = self.prices.get(key_of(algorithm, task, measured))
        if price is None:
            return None
        features, scaled = features_of(algorithm, task), _scaled(price, measured, task)
        return sum(amount * cost for amount, cost in zip(features, scaled, strict=True))

    def measured_for(self, task: Task) -> str:
        """The device, dtype and threads whose prices stand for the task's: its own, with other threads, or MEASURED."""
        own = circumstances(task)
        other = own[:-1] + ("n" if own.endswith("1") else "1")
        return next((each for each in (own, other) if each in self._circumstances), MEASURED)

    @cached_property
    def _circumstances(self) -> frozenset[str]:
        return frozenset("/".join(key.split("/")[:3]) for key in self.prices)


def _scaled(price: Features, measured: str, task: Task) -> Features:
    device, dtype, _ = measured.split("/")
    if dtype != task.dtype:
        price = price._replace(flops=price.flops * SLOWER.get(task.dtype, 1.0))
    if device != task.device:
        price = Features(LAUNCH, *(each / FASTER for each in price[1:]))
    return price


def circumstances(task: Task) -> str:
    return f"{task.device}/{task.dtype}/{'1' if task.threads == 1 else 'n'}"


def key_of(algorithm: Algorithm, task: Task, measured: str | None = None) -> str:
    """Tasks with the same key share prices."""
    wanted = task.contraction.wanted.name.lower()
    return "/".join((measured or circumstances(task), wanted, _kind(task), algorithm.name))


BLOCK = 8  # channels, which libraries lay side by side


def _kind(task: Task) -> str:
    """Layers for which libraries take code of its own: by how channels fill vectors, and by the kernel."""
    (outputs, c, *size), geometry = task.contraction.kernel, task.contraction.geometry
    o, groups = outputs // geometry.groups, geometry.groups
    if o == c == 1 and groups > 1:
        # Up to 3 taps a side are common enough for special code.
        return "depthwise" if max(size) <= 3 else "depthwise-large"
    if max(size) == 1:
        return "pointwise" if max(geometry.stride) == 1 else "pointwise-strided"
    if min(o, c) < BLOCK and groups > 1:
        return "narrow-groups"
    if min(o, c) < BLOCK:
        return "one-channel" if c == 1 else "few" if max(o, c) < BLOCK else "few-inputs" if c < BLOCK else "few-outputs"
    if groups > 1:
        return "groups"
    return "wide" if len(size) < 3 else "wide-volumes"


def features_of(algorithm: Algorithm, task: Task) -> Features:
    product = task.contraction
    calls = {"loop": task.batch, "taps": prod(product.kernel[2:])}.get(algorithm.name, 1)
    numbers = {role: prod(product.shape(role)) for role in Role}
    for role, mapped in zip((product.wanted, *FACTORS[product.wanted]), (True, *task.mapped), strict=True):
        numbers[role] *= task.batch if mapped else 1
    return Features(
        calls=1e-6 * calls,
        flops=2e-12 * algorithm.multiplications(task),
        activations=1e-9 * task.itemsize * (numbers[Role.IMAGE] + numbers[Role.RESPONSE]),
        kernels=1e-9 * task.itemsize * numbers[Role.KERNEL],
        traffic=1e-9 * algorithm.traffic(task),
        patches=1e-9 * task.itemsize * task.batch * product.multiplications / max(1, product.kernel[0]),
    )


def shared_copy(fold: Algorithm, task: Task) -> float:
    """Seconds of a fold's price that another fold in the same call pays: of a copy that they share, a half."""
    if task.shared is None or task.device != "cpu" or fold.workspace(task) == 0:
        return 0.0
    return 0.5 * FOLDED * task.batch * task.itemsize * prod(task.contraction.shape(task.shared))


def first_touch(fold: Algorithm, task: Task) -> int:
    """Bytes that a fold gets anew for certain: prices are of memory that was used before.

    What a fold makes, and what libraries lay out for it, comes from the C library, which as a rule gives the largest
    blocks back when they are freed. Others it may keep or not, which depends on all that a process does beside.
    """
    if task.device != "cpu" or not task.may_write or not task.machine.returns_large_blocks():
        return 0
    wanted = task.contraction.wanted
    mapped = [role for role, mapped in zip(FACTORS[wanted], task.mapped, strict=True) if mapped]
    numbers = [prod(task.contraction.shape(role)) for role in (wanted, *mapped)]
    blocks = [task.batch * task.itemsize * number for number in numbers] + [fold.workspace(task)]
    return sum(block for block in blocks if block >= GIVEN_BACK)


def cache_file() -> Path:
    """Where a calibration is kept."""
    return cache_directory() / "batching.json"


@lru_cache(maxsize=1)
def calibration() -> tuple[str, dict[str, Features]]:
    """Where this machine's prices come from, and those measured on it. Never raises: one can do without them."""
    path = _calibration()
    if path is None:
        return BUILT_IN, {}
    try:
        return f"calibration in {path}", load(path)
    except UNREADABLE as error:
        log.warning("a calibration of vmapped convolutions cannot be read, and is left alone: %r", error)
        return f"{BUILT_IN}, because a calibration cannot be read: {error!r}", {}


def _calibration() -> Path | None:
    """The file, if there is one and a home directory that can be looked into."""
    with suppress(OSError, RuntimeError):
        if (path := cache_file()).is_file():
            return path
    return None


@lru_cache(maxsize=1)
def price_table() -> PriceTable:
    """Of this machine."""
    return table_of(*calibration())


@lru_cache(maxsize=1)
def built_in() -> PriceTable:
    """Of any machine."""
    return table_of(BUILT_IN, {})


def table_of(source: str, measured: dict[str, Features]) -> PriceTable:
    """What was measured over the built-in table."""
    return PriceTable(source, {**_built_in_prices(), **measured})


@lru_cache(maxsize=1)
def _built_in_prices() -> dict[str, Features]:
    return parsed(json.loads(files("convmesh.batching").joinpath("prices.json").read_text())["prices"])


BUILT_IN = "built-in table"
# Whatever a file may hold: a RuntimeError is that of lists within lists without end.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def load(path: Path) -> dict[str, Features]:
    return parsed(json.loads(path.read_text())["prices"])


def parsed(prices: Mapping[str, Sequence[float]]) -> dict[str, Features]:
    """Prices as files hold them; a ValueError where a price is none."""
    made = {str(key): Features(*map(float, price)) for key, price in prices.items()}
    if not all(isfinite(number) and number >= 0 for price in made.values() for number in price):
        raise ValueError("a price is negative, or not a number")
    return made


def save(prices: Mapping[str, Features], path: Path) -> None:
    """Whole or not at all: a reader never sees half a table."""
    make_private(path.parent)
    lines = [f"{json.dumps(key)}: {json.dumps(price)}" for key, price in sorted(prices.items())]
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text('{"prices": {\n' + ",\n".join(lines) + "\n}}\n")
    unfinished.replace(path)
