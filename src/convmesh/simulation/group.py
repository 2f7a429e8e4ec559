"""The process group of simulated ranks: the rank that joins a collective last executes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import torch
import torch.distributed as dist

from . import collectives
from .collectives import Call, Lists
from .world import Meeting, Message, World

Tensors = list[torch.Tensor]
# Their methods' argument names differ between releases; torch passes them by position.
_ProcessGroup: Any = dist.ProcessGroup
_Work: Any = dist.Work


class Work(_Work):  # type: ignore[misc]
    """A started communication. Waiting for it lets the other ranks run."""

    def __init__(self, world: World, meeting: Meeting | Message, results: Any):
        super().__init__()
        self._world, self._meeting, self._results = world, meeting, results
        self._abandoned = False
        world.turns.current.works.add(self)

    def wait(self, timeout: Any = None) -> bool:
        if not self._abandoned:
            self._world.turns.wait(lambda: self._meeting.done, self._meeting.describe)
        return True

    def abandon(self) -> list[torch.Tensor]:
        """Mark it as never to be awaited, and return its results."""
        self._abandoned = True
        return list(self._results)

    def is_completed(self) -> bool:
        if not self._meeting.done:
            self._world.turns.yield_turn()
        return self._meeting.done

    def is_success(self) -> bool:
        return self._meeting.done

    def exception(self) -> None:
        return None

    def result(self) -> Any:
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future

    def _source_rank(self) -> int:
        assert isinstance(self._meeting, Message)
        assert self._meeting.source is not None, "its sender has come"
        return self._meeting.source


class Group(_ProcessGroup):  # type: ignore[misc]
    """The process group of one simulated rank. Its methods are those that torch calls, by all names they have had."""

    supports_coalescing = supports_splitting = False

    def __init__(self, world: World, name: str, ranks: tuple[int, ...], rank: int):
        super().__init__(rank, len(ranks))
        self._world, self._size, self._rank = world, len(ranks), rank
        self._meetings = world.meetings_of(name, ranks)
        self._calls = 0
        self._name = self._desc = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "threaded"

    def _get_backend(self, device: torch.device) -> Group:
        return self

    def messages_between(self, ranks: tuple[int, ...], purpose: str) -> Group:
        """Return a group of these ranks of the world, created without the others."""
        return Group(self._world, purpose, ranks, ranks.index(self._rank))

    def _meet(self, call: Call) -> Work:
        meeting = self._meetings.join(self._rank, self._calls, call)
        self._calls += 1
        return Work(self._world, meeting, [tensor for tensors in call.takes for tensor in tensors])

    def allreduce(self, tensors: Tensors | torch.Tensor, opts: Any = None) -> Work:
        given = _listed(tensors)
        op = _op(opts)
        return self._meet(Call(_what("all_reduce", given, op), collectives.all_reduce, [given], [given], op=op))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        what = f"{_what('reduce', tensors, _op(opts))} to {opts.rootRank}"
        root, op = opts.rootRank, _op(opts)
        return self._meet(Call(what, collectives.reduce_to_root, [tensors], [tensors], op=op, root=root))

    def broadcast(self, tensors: Tensors | torch.Tensor, opts: Any) -> Work:
        given, root = _listed(tensors), opts.rootRank
        what = f"{_what('broadcast', given)} from {root}"
        return self._meet(Call(what, collectives.broadcast, [given], [given], root=root))

    def allgather(self, outputs: Lists, inputs: Tensors, opts: Any = None, name: str = "all_gather") -> Work:
        for tensor, parts in zip(inputs, outputs, strict=True):
            if len(parts) != self._size or parts[self._rank].numel() != tensor.numel():
                raise ValueError(f"{name}: results of {_shapes(parts)} of tensors of {_shapes([tensor])}")
        what = f"{name} of {_counts(outputs)} x {inputs[0].dtype}"
        return self._meet(Call(what, collectives.all_gather, [[one] for one in inputs], outputs))

    allgather_coalesced = partialmethod(allgather, name="all_gather_coalesced")

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        parts = [self._parts(output) for output in outputs]
        return self.allgather(parts, inputs, name="all_gather_into_tensor")

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [input])

    allgather_into_tensor_coalesced, _allgather_base = all_gather_single_coalesced, all_gather_single

    def gather(self, outputs: Lists, inputs: Tensors, opts: Any) -> Work:
        what = f"{_what('gather', inputs)} to {opts.rootRank}"
        takes = outputs if self._rank == opts.rootRank else []
        return self._meet(Call(what, collectives.all_gather, [inputs], takes, root=opts.rootRank))

    def scatter(self, outputs: Tensors, inputs: Lists, opts: Any) -> Work:
        what = f"{_what('scatter', outputs)} from {opts.rootRank}"
        gives = inputs if self._rank == opts.rootRank else [[]]
        return self._meet(Call(what, collectives.scatter, gives, [outputs], root=opts.rootRank))

    def reduce_scatter(self, outputs: Tensors, inputs: Lists, opts: Any = None, name: str = "reduce_scatter") -> Work:
        op = _op(opts)
        what = f"{name} of {_counts(inputs)} x {inputs[0][0].dtype}, {op.name.lower()}"
        for output, parts in zip(outputs, inputs, strict=True):
            if len(parts) != self._size or parts[self._rank].numel() != output.numel():
                raise ValueError(f"{name}: a result of {_shapes([output])} of parts of {_shapes(parts)}")
        return self._meet(Call(what, collectives.reduce_scatter, inputs, [[one] for one in outputs], op=op))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self.reduce_scatter(outputs, [self._parts(one) for one in inputs], opts, "reduce_scatter_tensor")

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _reduce_scatter_base = reduce_scatter_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, name: str = "all_to_all") -> Work:
        what = f"{name} of {inputs[0].dtype}"
        return self._meet(Call(what, collectives.all_to_all, [inputs], [outputs], by_rank=True))

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, receives: Sequence[int], sends: Sequence[int], opts: Any = None
    ) -> Work:
        outputs = list(output.split(list(receives))) if receives else self._parts(output)
        inputs = list(input.split(list(sends))) if sends else self._parts(input)
        return self.alltoall(outputs, inputs, name="all_to_all_single")

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        return self._meet(Call("barrier", collectives.barrier, [[]], [[]]))

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        return self._message(tensors, self._rank, to, tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        return self._message(tensors, source, self._rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        return self._message(tensors, None, self._rank, tag)

    def _message(self, tensors: Tensors, source: int | None, to: int, tag: int) -> Work:
        message = self._meetings.exchange(tensors[0], source, to, tag, sends=to != self._rank)
        return Work(self._world, message, tensors)

    def _parts(self, tensor: torch.Tensor) -> Tensors:
        if tensor.numel() % self._size:
            raise ValueError(f"{_shapes([tensor])} cannot be divided by {self._size} ranks")
        return list(tensor.detach().view(-1).view(self._size, -1).unbind())


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _op(opts: Any) -> Any:
    return dist.ReduceOp.SUM if opts is None else opts.reduceOp.op if hasattr(opts, "reduceOp") else opts.op


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def _counts(lists: Lists) -> str:
    """Return element counts as text, per list: a single number if all ranks have the same."""
    counts = [[tensor.numel() for tensor in tensors] for tensors in lists]
    return ", ".join(str(one[0] if len(set(one)) == 1 else one) for one in counts)


def _what(name: str, tensors: Sequence[torch.Tensor], op: Any = None) -> str:
    return f"{name} of {_shapes(tensors)}{'' if op is None else f', {op.name.lower()}'}"
