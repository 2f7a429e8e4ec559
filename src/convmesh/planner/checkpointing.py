"""What activation checkpointing would give: the memory of a step whose largest blocks are computed once more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from .memory import first_backward, kinds_of
from .timing import Seconds
from .trace import Block, Compute, Kind, Phase, Trace

MOST = 6  # blocks that are suggested
WORTH_IT = 0.02  # of the peak


@dataclass(frozen=True)
class Checkpoint:
    """One more block under `torch.utils.checkpoint`, besides those of the rows before: the peak then, in bytes, and the
    seconds that a step takes longer with all of them."""

    block: str
    peak: int
    seconds: float


def checkpoints(trace: Trace, seconds: Seconds) -> list[Checkpoint]:
    """Choose blocks one after the other, each time the one that lowers the peak most, while it is worth it."""
    curve = _Curve(trace)
    chosen: list[str] = []
    peak, rows = curve.peak(()), []
    while len(chosen) < MOST:
        free = [name for name in curve.blocks if not any(_holds(name, one) or _holds(one, name) for one in chosen)]
        tried = {name: curve.peak((*chosen, name)) for name in free}
        best = min(tried, key=lambda name: (tried[name], len(curve.within(name))), default=None)
        if best is None or tried[best] > peak * (1 - WORTH_IT):
            break
        chosen.append(best)
        peak = tried[best]
        rows.append(Checkpoint(best, peak, sum(curve.again(name, seconds) for name in chosen)))
    return rows


def _holds(block: str, layer: str) -> bool:
    return layer == block or layer.startswith(block + ".")


class _Curve:
    """Memory over the events of a step, without what checkpointed blocks would not keep."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._turn = trace, first_backward(trace)
        pairs = zip(trace.blocks, kinds_of(trace), strict=True)
        self._kept = [block for block, kind in pairs if kind is Kind.ACTIVATIONS and block.born >= trace.begins]
        self._events = list(enumerate(trace.events[trace.begins :], trace.begins))
        names = {block.layer for block in self._kept}
        parents = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 1)}
        self.blocks = sorted(parent for parent in parents if len(self.within(parent)) > 1)
        self._times = {name: self._span(name) for name in self.blocks}

    def within(self, name: str) -> list[Block]:
        """Return what a checkpointed block would not keep: all of its activations but those that it returns."""
        inside = [block for block in self._kept if _holds(name, block.layer)]
        return [block for block in inside if block.leaves is None or not _holds(block.leaves, name)]

    def _span(self, name: str) -> tuple[int, int]:
        """Return the last event of a block's forward pass, and the first of its backward pass."""
        mine = [(at, event) for at, event in self._events if isinstance(event, Compute) and _holds(name, event.layer)]
        forward = [at for at, event in mine if event.phase is Phase.FORWARD]
        backward = [at for at, event in mine if event.phase is Phase.BACKWARD]
        return max(forward, default=self._turn), min(backward, default=self._turn)

    def peak(self, names: tuple[str, ...]) -> int:
        """Return the peak if these blocks were checkpointed: between their passes their activations are not there."""
        changes: Counter[tuple[int, int]] = Counter()  # by event; what comes before what goes

        def lives(block: Block, born: int, died: int | None) -> None:
            changes[born, 0] += block.size
            if died is not None:
                changes[died, 1] -= block.size

        pauses = {id(block): self._times[name] for name in names for block in self.within(name)}
        for block in self._trace.blocks:
            begin, died = max(block.born, self._trace.begins), block.died
            if died is not None and died <= self._trace.begins:
                continue
            if id(block) not in pauses:
                lives(block, begin, died)
                continue
            stop, again = pauses[id(block)]
            lives(block, begin, max(begin, stop + 1))
            if died is None or died > again:
                lives(block, again, died)
        return max(_running(changes))

    def again(self, name: str, seconds: Callable[[Compute], float]) -> float:
        mine = (event for _, event in self._events if isinstance(event, Compute) and _holds(name, event.layer))
        return sum(seconds(event) for event in mine if event.phase is Phase.FORWARD)


def _running(changes: Mapping[tuple[int, int], int]) -> Iterator[int]:
    total = 0
    for at in sorted(changes):
        total += changes[at]
        yield total
