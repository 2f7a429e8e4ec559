"""Lines of ranks: those over which one tensor dimension is cut, and sending along them.

A dimension that is cut over several mesh dimensions has no process group of its own. Its messages hop along the mesh
dimensions one after the other, in the groups that the mesh has: making groups would need ranks that may not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from . import traffic

Place = tuple[int, ...]


@dataclass(frozen=True)
class Line:
    """The ranks that differ from this one only along some mesh dimensions, numbered in the order of what they own."""

    groups: tuple[dist.ProcessGroup, ...]
    sizes: Place
    here: Place

    @cached_property
    def size(self) -> int:
        return prod(self.sizes)

    @cached_property
    def rank(self) -> int:
        return self.places.index(self.here)

    @cached_property
    def places(self) -> list[Place]:
        """Where each rank stands along the mesh dimensions."""
        return list(product(*map(range, self.sizes)))

    def send(self, messages: Sequence[torch.Tensor], count: Callable[[int, int], int]) -> torch.Tensor:
        """Start sending one flat message to every rank; what comes in, in the order of its sources, is to be awaited.

        `count(src, dst)` is the length of any rank's message to any other: all ranks know all of them.
        """
        if len(self.groups) == 1:
            here = self.rank
            counts = range(self.size)
            return _all_to_all(
                messages, [count(src, here) for src in counts], [count(here, dst) for dst in counts], self.groups[0]
            )
        return self._hop(messages, count)

    def _hop(self, messages: Sequence[torch.Tensor], count: Callable[[int, int], int]) -> torch.Tensor:
        """Along the last mesh dimension first. Before hop `d` a message is where its source is along the dimensions
        up to `d`, and where its destination is along those after it."""
        places = self.places
        pairs = [(src, dst) for src in range(self.size) for dst in range(self.size) if count(src, dst)]
        bags = {(self.rank, dst): message for dst, message in enumerate(messages)}
        received = messages[0]
        for hop in reversed(range(len(self.sizes))):
            held = [pair for pair in pairs if self._holder(pair, hop + 1) == self.here]
            coming = [pair for pair in pairs if self._holder(pair, hop) == self.here]
            held.sort(key=lambda pair: places[pair[1]][hop])
            coming.sort(key=lambda pair: places[pair[0]][hop])
            received = _all_to_all(
                [messages[0][:0], *(bags[pair] for pair in held)],
                [sum(count(*pair) for pair in coming if places[pair[0]][hop] == at) for at in range(self.sizes[hop])],
                [sum(count(*pair) for pair in held if places[pair[1]][hop] == at) for at in range(self.sizes[hop])],
                self.groups[hop],
            )
            if hop:
                parts = _torch.wait(received).split([count(*pair) for pair in coming])
                bags = dict(zip(coming, parts, strict=True))
        return received

    def _holder(self, pair: tuple[int, int], hop: int) -> Place:
        """Who has the message before hop `hop - 1`, that is after hop `hop`."""
        src, dst = (self.places[rank] for rank in pair)
        return (*src[:hop], *dst[hop:])


def line(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Line:
    """The ranks along `mesh_dims`, the first of these outermost."""
    return Line(
        tuple(mesh.get_group(dim) for dim in mesh_dims),
        tuple(mesh.size(dim) for dim in mesh_dims),
        tuple(mesh.get_local_rank(dim) for dim in mesh_dims),
    )


def _all_to_all(
    messages: Sequence[torch.Tensor], incoming: Sequence[int], outgoing: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    filled = [message for message in messages if message.numel()]
    # What goes to one rank only is sent as it is, which may be a part of another tensor.
    buffer = filled[0].contiguous() if len(filled) == 1 else torch.cat(list(messages))
    traffic.note(buffer.numel() * buffer.element_size())
    return _torch.all_to_all(buffer, incoming, outgoing, group)
