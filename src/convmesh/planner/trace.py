"""What a rank did in a step, as plain numbers: local operators, collectives, and the life of every storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .needs import Need

LOSS, WEIGHTS, OPTIMIZER = "loss", "weight gradients", "optimizer"  # what is the work of no module


class Phase(StrEnum):
    """The part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Use(StrEnum):
    """What a collective is for."""

    HALO = "halo"
    REDUCTION = "reduction"
    GATHER = "gather"
    RESHARD = "reshard"  # from one dimension to another, in an all-to-all


class Kind(StrEnum):
    """The memory of a rank, by what it is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    INPUTS = "inputs"
    ACTIVATIONS = "saved activations"
    HALOS = "halos"
    BUCKETS = "buckets"
    TEMPORARIES = "temporaries"
    WORKSPACES = "workspaces"


class Compute(NamedTuple):
    """A local operator. `bytes` are those that it reads and writes; a view moves none, and is not listed."""

    operator: str
    layer: str
    phase: Phase
    flops: int
    bytes: int
    dtype: torch.dtype


class Send(NamedTuple):
    """The start of a collective. `bytes` are those that this rank gives to it, `peers` the other ranks of its group."""

    operator: str
    layer: str
    phase: Phase
    use: Use
    bytes: int
    along: tuple[str, ...]  # mesh dimensions
    peers: int
    number: int
    where: str | None = None  # a line of the user's code, of a gather of tensors
    to: tuple[tuple[int, int], ...] = ()  # of halos: (rank, bytes)


class Wait(NamedTuple):
    """A local operator needs the result of a collective."""

    number: int


Event = Compute | Send | Wait


@dataclass(slots=True)
class Block:
    """A storage. It lives from one event to another; `died` is None while it does."""

    size: int
    layer: str
    phase: Phase
    born: int
    died: int | None = None
    kind: Kind | None = None  # where it is known by whom it belongs to
    leaves: str | None = None  # the outermost module that returns it
    number: int = 0  # among the blocks of its trace


class Refusal(NamedTuple):
    """An operator that raises a `ShardingError` on this mesh. The plan went on as if its tensors were replicated."""

    layer: str
    where: str | None
    message: str
    remedy: str


@dataclass
class Trace:
    """The record of one rank. Events from `begins` on are the step that is looked at; those before warm it up."""

    coordinate: tuple[int, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)  # (event, number of a block, 1 born or -1 died)
    needs: list[Need] = field(default_factory=list)  # of the step that is looked at
    refusals: list[Refusal] = field(default_factory=list)
    begins: int = 0
    exceeded: int | None = None  # the bytes at which the run ended, because they were more than a limit

    @property
    def step(self) -> list[Event]:
        return self.events[self.begins :]
