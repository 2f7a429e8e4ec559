"""An entry of the zoo: how a network is made, what it is called with, and along which dimensions that is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import convmesh

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""The shape of a mesh, and the dimension of the input that is sharded over each of its dimensions."""

# Two of each: over all of space, and over one dimension whose shards are uneven, or over samples and space.
IMAGE: tuple[Layout, ...] = (((2, 2), (2, 3)), ((3,), (3,)))
VOLUME: tuple[Layout, ...] = (((2, 2), (2, 3)), ((3,), (4,)))
SIGNAL: tuple[Layout, ...] = (((4,), (2,)), ((2, 2), (0, 2)))
VIDEO: tuple[Layout, ...] = (((2, 2), (3, 4)), ((2,), (2,)))  # over height and width, and over time
TOKENS: tuple[Layout, ...] = (((4,), (1,)), ((2, 2), (0, 1)))

# What may differ after many layers, relative to the largest number of a tensor.
DOUBLE, SINGLE = 1e-7, 1e-4


@dataclass(frozen=True)
class Network:
    """`build` makes the module, and `call` calls it with the input, a tensor of this shape, and with constants that
    `more` makes. Parameters are drawn at random, the same for one process and many."""

    package: str
    name: str
    build: Callable[[], Any]
    input: tuple[int, ...]
    layouts: tuple[Layout, ...] = IMAGE
    call: Callable[..., Any] = lambda model, x: model(x)
    more: Callable[[], Mapping[str, Any]] = dict
    train: bool = True
    backward: bool = True
    integers: int = 0  # classes of an input of labels
    positive: bool = False  # numbers between 0 and 1
    replicated: str = ""  # why some rank has all of an activation, in words for the page
    single: bool = False  # some of it is computed in float32, whatever it is given: a run sees to it that this is so

    @property
    def tolerance(self) -> float:
        return SINGLE if self.single else DOUBLE

    def numbers(self) -> torch.Tensor:
        torch.manual_seed(1)
        if self.integers:
            return torch.randint(self.integers, self.input)
        made = torch.rand if self.positive else torch.randn
        return made(self.input, dtype=torch.float64, requires_grad=self.backward)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        made: torch.nn.Module = self.build()
        made = made.double().train(self.train)
        made._apply(lambda one: one.cdouble() if one.is_complex() else one)  # which `double` leaves as they are
        with torch.no_grad():  # what is zero at first would hide what comes before it
            for parameter in made.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
        return made


def beside(x: torch.Tensor, given: Any) -> Any:
    """What a network gets beside its input: replicated, where that is sharded."""
    if not isinstance(x, DTensor):
        return given
    return tree_map_only(torch.Tensor, lambda one: convmesh.replicate(one, x.device_mesh), given)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of numbers in what a model returns, in a fixed order."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        for name, one in vars(value).items():
            if not name.startswith("_"):
                yield from tensors(one)
