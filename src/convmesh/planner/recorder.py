"""Records what a rank does: it sees every operator on local tensors, with values or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from .. import _torch
from ..comm import Traffic, count_traffic, replaces_reduction
from ..sharding.errors import ShardingError
from . import shapes
from .groups import Groups
from .layers import Layers
from .needs import need
from .refusals import refusal, replicated
from .trace import WEIGHTS, Block, Compute, Event, Kind, Phase, Send, Trace, Use, Wait
from .workspaces import size_of, workspace

aten = torch.ops.aten
_FUNCTIONAL, _IN_PLACE, _RESHARD = "_c10d_functional::", "c10d::", "shard_dim_alltoall"


class ExceededError(Exception):
    """A run needs more memory than it may have."""


class Recorder(_torch.TorchDispatchMode):
    """Books operators, collectives and storages of one rank in a trace, each to the module at work."""

    def __init__(self, trace: Trace, layers: Layers, traffic: Traffic, limit: int | None = None) -> None:
        super().__init__()
        self.trace, self._layers, self._traffic, self._limit = trace, layers, traffic, limit
        self._exchanges = traffic.exchanges
        layers.returned = self._returned
        self._live: dict[int, tuple[Block, ref[Any]]] = {}
        self._total = 0
        self._under_way: dict[int, int] = {}  # by the memory of its result, the number of a collective
        self._sent = 0
        self._groups = Groups(trace.mesh)
        self._within = False  # an operator on DTensors
        self._operator = ""  # its name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return self._sharded(func, args, kwargs or {})
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs.values())))
        if any(tensor.is_meta for tensor in given) and not all(tensor.is_meta for tensor in given):
            args, kwargs = _without_values(args), {name: _without_values(value) for name, value in kwargs.items()}
        silent = bool(given) and given[0].is_meta
        result = shapes.result(func, args, kwargs) if silent else func(*args, **kwargs)
        made = list(_tensors((result,)))
        layer, phase = self._layers.at_work()
        self.trace.events.extend(self._events(func, args, kwargs, result, given, made, layer, phase))
        for tensor in given if layer is WEIGHTS else ():
            self.mark(tensor, Kind.GRADIENTS, known=False)
        for tensor in made:
            self._keep(tensor, layer, phase)
        if size := workspace(func, given, made):
            self._work_in(size, layer, phase)
        return result

    def _sharded(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on DTensors, whose local operators come here afterwards. One that is refused is noted."""
        if self._within:
            return NotImplemented
        layer, phase = self._layers.at_work()
        found = need(func, args, layer, phase)
        if found is not None:
            self.trace.needs.append(found)
        self._within, self._operator = True, _torch.name_of(func)
        try:
            with self:
                return func(*args, **kwargs)
        except ShardingError as error:
            result = replicated(func, args, kwargs, error)
            self.trace.refusals.append(refusal(error, layer, self._layers.line()))
            return result
        finally:
            self._within, self._operator = False, ""

    def _events(
        self, func: Any, args: Any, kwargs: Any, result: Any, given: list[torch.Tensor], made: list[torch.Tensor],
        layer: str, phase: Phase,
    ) -> Iterable[Event]:  # fmt: skip
        name: str = func.name()
        if name.startswith(_FUNCTIONAL):
            if "wait_tensor" in name:
                number = self._under_way.pop(_torch.memory_of(args[0]), None)
                return () if number is None else (Wait(number),)
            if _torch.name_of(func) in _torch.COLLECTIVES:
                return (self._send(name.removeprefix(_FUNCTIONAL), args, given, made, layer, phase),)
        if name == f"_dtensor::{_RESHARD}":  # which waits by itself
            sent = self._send(_RESHARD, args, given, made, layer, phase)
            return sent, Wait(self._under_way.pop(_torch.memory_of(made[0])))
        if name.startswith(_IN_PLACE):
            return self._in_place(name.removeprefix(_IN_PLACE), args, layer, phase)
        if _torch.is_view_operator(func) or (not made and not given):
            return ()
        packet = func.overloadpacket
        flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
        moved = sum(size_of(tensor) for tensor in (*given, *made))
        dtype = (given or made)[0].dtype
        return (Compute(name, layer, phase, flops, moved, dtype),)

    def _send(
        self, name: str, args: Any, given: list[torch.Tensor], made: list[torch.Tensor], layer: str, phase: Phase
    ) -> Send:
        before, self._exchanges = self._exchanges, self._traffic.exchanges
        use = Use.HALO if self._exchanges > before else _use(name)
        self._sent += 1
        for tensor in made:
            self._under_way[_torch.memory_of(tensor)] = self._sent
        for tensor in given if use is not Use.RESHARD else ():
            self.mark(tensor, Kind.HALOS if use is Use.HALO else Kind.BUCKETS, known=False)
        size = sum(map(size_of, given))
        to = self._groups.messages(args[-1], args[2], given[0].element_size()) if use is Use.HALO else ()
        along, peers = self._groups.along(args[-1])
        if to:
            along = self._groups.between(to)
        where = (self._layers.line() or layer) if use is Use.GATHER and not replaces_reduction() else None
        name = self._operator if use is Use.GATHER else name
        return Send(name, layer, phase, use, size, along, peers, self._sent, where, to)

    def _in_place(self, name: str, args: Any, layer: str, phase: Phase) -> Iterable[Event]:
        """Book collectives that FSDP2 and users call: nobody can see when they are waited for."""
        groups = [dist.ProcessGroup.unbox(one) for one in args if "ProcessGroup" in str(one)]
        if not groups:
            return ()
        self._sent += 1
        given = list(_tensors(args[1:2] if "base" in name else args[:1]))
        use = _use(name)
        along, peers = self._groups.along(groups[0])
        return (Send(name, layer, phase, use, sum(map(size_of, given)), along, peers, self._sent),)

    def _keep(self, tensor: torch.Tensor, layer: str, phase: Phase) -> None:
        storage = tensor.untyped_storage()
        key, size = _torch.memory_of(tensor), storage.nbytes()
        if key in self._live or not size:
            return
        block = Block(size, layer, phase, len(self.trace.events))
        if self._under_way.get(key) is not None:
            sent = self.trace.events[-1]
            block.kind = Kind.HALOS if isinstance(sent, Send) and sent.use is Use.HALO else Kind.BUCKETS
        block.number = len(self.trace.blocks)
        self.trace.blocks.append(block)
        self.trace.changes.append((block.born, block.number, 1))
        self._live[key] = block, ref(storage, partial(self._free, key))
        self._total += size
        self._check(self._total)

    def _check(self, held: int) -> None:
        if self._limit is not None and held > self._limit:
            self.trace.exceeded = held
            raise ExceededError

    def _work_in(self, size: int, layer: str, phase: Phase) -> None:
        """Book a workspace: memory that an operator needs while it runs."""
        now = len(self.trace.events)
        block = Block(size, layer, phase, now, now, Kind.WORKSPACES, number=len(self.trace.blocks))
        self.trace.blocks.append(block)
        self.trace.changes += [(now, block.number, 1), (now, block.number, -1)]
        self._check(self._total + size)

    def _free(self, key: int, _: Any) -> None:
        block, _ = self._live.pop(key)
        block.died = len(self.trace.events)
        self.trace.changes.append((block.died, block.number, -1))
        self._total -= block.size

    def _returned(self, tensor: torch.Tensor, module: str) -> None:
        """Note that a module returns a tensor; those around it come later, and may return it too."""
        found = self._block_of(tensor)
        if found is not None:
            found.leaves = module

    def mark(self, tensor: torch.Tensor | None, kind: Kind, known: bool = True) -> None:
        """Note what the storage of a tensor is for; if that is not `known` but likely, only where nothing is noted
        yet."""
        found = None if tensor is None else self._block_of(tensor)
        if found is not None and (known or found.kind is None):
            found.kind = kind

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        local = _torch.slot_of(tensor) if isinstance(tensor, DTensor) else tensor
        if isinstance(local, AsyncCollectiveTensor):
            local = local.elem
        found = self._live.get(_torch.memory_of(local))
        return None if found is None else found[0]

    def mark_state(self) -> None:
        """Note parameters, gradients and optimizer state of all modules that have been called."""
        for root in self._layers.roots:
            for tensor in (*root.parameters(), *root.buffers()):
                self.mark(tensor, Kind.PARAMETERS)
                self.mark(tensor.grad, Kind.GRADIENTS)
        for optimizer in self._layers.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    self.mark(value if isinstance(value, torch.Tensor) else None, Kind.OPTIMIZER)


def recorded(trace: Trace, layers: Layers, run: Callable[[Recorder], None], limit: int | None = None) -> Trace:
    """Run something under a recorder, up to where it takes more memory than `limit`, in bytes."""
    with count_traffic() as traffic, layers:
        recorder = Recorder(trace, layers, traffic, limit)
        try:
            with recorder:
                run(recorder)
        except ExceededError:
            pass
    return trace


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple) or type(value).__name__ == "dict_values":
            yield from _tensors(value)


def _without_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(_torch.DEVICE)
    return type(value)(map(_without_values, value)) if type(value) in (list, tuple) else value


def _use(name: str) -> Use:
    return Use.GATHER if "gather" in name else Use.RESHARD if name == _RESHARD else Use.REDUCTION
