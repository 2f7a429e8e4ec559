"""What a rank makes and what reaches it, by size: a gather is seen whatever it is called, and whatever carried it.

CommDebugMode counts collectives, but not their sizes, and knows nothing of tensors that nobody had to send. And it puts
hooks on modules, which autograd does not let an in-place activation follow, so real networks cannot run under it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from convmesh import _torch
from convmesh._torch.names import COLLECTIVES

# Of a tensor: with two ranks half of one may have to change places, as when it is flipped.
MOST = 0.75


class Sizes(TorchDispatchMode):
    """The largest plain tensor that this rank makes, and what arrives at it from other ranks, all in bytes.

    Views make nothing, whatever their shape: what counts is memory that no operand had. Everything that is sent is sent
    by an operator of torch, be it through gloo or through the memory that ranks of one machine share. A gather and a
    reduction bring their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.maker = "nothing"
        self.received = 0
        self.received_at_once = 0
        self.replicated_at_once = 0  # of that, what all ranks get alike: by a gather, a broadcast, a reduction

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # what it does itself is seen here afterwards
        result = func(*args, **(kwargs or {}))
        given, made = _plain((args, kwargs)), _plain(result)
        before = {_torch.memory_of(tensor) for tensor in given}
        for tensor in made:
            if _torch.memory_of(tensor) not in before:
                self._note(tensor.untyped_storage().nbytes(), f"{func} of shape {tuple(tensor.shape)}")
        arriving = _arriving(func, args, made)
        self.received += arriving
        self.received_at_once = max(self.received_at_once, arriving)
        if "to_all" not in func.name():
            self.replicated_at_once = max(self.replicated_at_once, arriving)
        return result

    def _note(self, size: int, maker: str) -> None:
        if size > self.largest:
            self.largest, self.maker = size, maker


def is_whole(one: Sizes, many: Sizes, *given: torch.Tensor) -> bool:
    """Whether a rank has made a tensor as large as the largest of one process, or got most of one at once.

    `given` are the tensors of one process that are sharded on many. Of small ones, whose halos are about as large as
    they are, that says nothing.
    """
    return bool(why_whole(one, many, *given))


def why_whole(one: Sizes, many: Sizes, *given: torch.Tensor) -> str:
    """What `is_whole` says of it: what made such a tensor, or how much came at once; empty if neither."""
    whole = max([one.largest, *(tensor.nbytes for tensor in given)])
    if many.received_at_once >= MOST * whole:
        return f"{many.received_at_once} of {whole} bytes are sent at once"
    return f"{many.maker}" if many.largest >= whole else ""


def is_sent_whole(one: Sizes, many: Sizes, tensors: Iterable[tuple[torch.Tensor | None, tuple[Any, ...]]]) -> bool:
    """Whether all ranks got most of a sharded tensor at once, however small that is; `tensors` with where they lie.

    To add up a pending sum is to send all of it, and does not count. Nor does what ranks send each other: of a small
    tensor that is as much for a halo, or for statistics.
    """
    placed = [(tensor, at) for tensor, at in tensors if tensor is not None]
    cut = [tensor.nbytes for tensor, at in placed if any(isinstance(p, int) for p in at)]
    if not cut or any("P" in at for _, at in placed):
        return False
    return many.replicated_at_once >= MOST * max([one.largest, *cut])


def _plain(tree: Any) -> list[torch.Tensor]:
    """The tensors in memory: not DTensors, which have their local tensors there, nor those that a compiler makes up."""
    found = [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    return [t for t in found if not isinstance(t, DTensor | FakeTensor) and not t.is_meta]


def _arriving(func: Any, args: Any, made: list[torch.Tensor]) -> int:
    """What an operator brings from other ranks: nothing, if it is no collective."""
    name = func.name()
    if name.startswith("c10d::") and "send" not in name:
        return _bytes(_plain(args[0]))  # where torch.distributed's own functions put what comes
    if not name.startswith("_c10d_functional::") or _torch.name_of(func) not in COLLECTIVES:
        return 0
    if "all_to_all" in name:
        receive, group = args[1], _torch.group_called(args[3])
        row = _bytes(made) // max(1, sum(receive))
        return row * (sum(receive) - receive[group.rank()])
    return _bytes(made)


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
