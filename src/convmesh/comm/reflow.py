"""Elements in a row, of which each rank has a range or stripes: from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad

from .. import _torch
from ..geometry import Interval, Stripes
from .rank_line import Line

Ranges = tuple[Interval, ...]


def to_ranges(tensor: torch.Tensor, stripes: Stripes, ranges: Ranges, line: Line) -> torch.Tensor:
    """From (L, what this rank has of the elements, T) to (L, the range of them that it gets, T)."""
    here = line.rank
    sent = [tensor.narrow(1, part.start, len(part)) for part in (stripes.within(here, wanted) for wanted in ranges)]
    blocks = _exchanged(sent, lambda src, dst: len(stripes.within(src, ranges[dst])), line)
    if stripes.outer == 1:
        return torch.cat(blocks, 1)
    wanted = ranges[here]
    rows = stripes.rows(wanted)
    lead, _, trail = tensor.shape
    whole = []
    for src, block in enumerate(blocks):
        length = len(stripes.stripe(src))
        missing = stripes.count_before(src, wanted.start) - rows.start * length
        behind = len(rows) * length - missing - block.shape[1]
        whole.append(pad(block, (0, 0, missing, behind)).view(lead, len(rows), length, trail))
    together = torch.cat(whole, 2).view(lead, len(rows) * stripes.row, trail)
    return together.narrow(1, wanted.start - rows.start * stripes.row, len(wanted))


def to_stripes(tensor: torch.Tensor, stripes: Stripes, ranges: Ranges, line: Line) -> torch.Tensor:
    """From (L, this rank's range of the elements, T) to (L, what it gets of them, T): `to_ranges` backwards."""
    own = ranges[line.rank]
    rows = stripes.rows(own)
    lead, _, trail = tensor.shape
    # The first and the last row are filled up, to cut all rows alike.
    missing = own.start - rows.start * stripes.row
    behind = rows.stop * stripes.row - own.stop
    table = pad(tensor, (0, 0, missing, behind)).view(lead, len(rows), stripes.row, trail)
    sent = []
    for dst in range(line.size):
        stripe, part = stripes.stripe(dst), stripes.within(dst, own)
        all_rows = table.narrow(2, stripe.start, len(stripe)).reshape(lead, len(rows) * len(stripe), trail)
        sent.append(all_rows.narrow(1, part.start - rows.start * len(stripe), len(part)))
    return torch.cat(_exchanged(sent, lambda src, dst: len(stripes.within(dst, ranges[src])), line), 1)


def _exchanged(sent: Sequence[torch.Tensor], count: Callable[[int, int], int], line: Line) -> list[torch.Tensor]:
    """What every rank has for this one, of (L, elements, T); `count` is how many elements any has for any other."""
    lead, _, trail = sent[0].shape
    messages = [block.reshape(-1) for block in sent]
    received = _torch.wait(line.send(messages, lambda src, dst: lead * count(src, dst) * trail))
    counts = [count(src, line.rank) for src in range(line.size)]
    blocks = received.split([lead * elements * trail for elements in counts])
    return [block.view(lead, elements, trail) for block, elements in zip(blocks, counts, strict=True)]
