"""One rank that lives in another world than the others, and what all ranks compute and send meanwhile.

Nothing that only this rank knows may change what is sent, or the bits of a result.
"""

from __future__ import annotations

import gc
import hashlib
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_iter, tree_leaves

from convmesh import _torch, comm
from convmesh.comm import agreed_facts
from convmesh.kernels import library
from convmesh.sharding import installation, registry


@dataclass
class Record:
    """Of one program on one rank."""

    bits: list[str] = field(default_factory=list)  # of this rank's part of each result
    same: list[str] = field(default_factory=list)  # of what all ranks should have alike
    sent: list[str] = field(default_factory=list)  # what any rank may know of each communication
    sizes: list[tuple[Any, ...]] = field(default_factory=list)  # and what is this rank's own
    families: set[str] = field(default_factory=set)


def record(program: Callable[[], Any]) -> Record:
    """Run a program, which returns tensors."""
    made = Record()
    known = registry.declared()

    def sending(operator: _torch.Operator, args: tuple[Any, ...], group: dist.ProcessGroup) -> None:
        name, tensors = _torch.name_of(operator), tree_leaves(args[0])
        shapes = [tuple(tensor.shape) for tensor in tensors]
        single = name == "all_to_all_single"  # of which every rank sends as much as it has
        made.sent.append(f"{name} {[t.dtype for t in tensors]} {'' if single else shapes} {group.group_desc}")
        made.sizes.append((shapes, args[1:3]) if single else ())

    def computing(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if operator in known:
            made.families.add(known[operator].family)

    ends = [comm.observe(sending), installation.observe(computing)]
    try:
        torch.manual_seed(0)
        for result in tree_leaves(program()):
            _note(made, result)
    finally:
        for end in ends:
            end()
    return made


def _note(made: Record, result: Any) -> None:
    if isinstance(result, DTensor):
        result = result.detach()
        if all(isinstance(placement, Replicate) for placement in result.placements):
            made.same.append(_digest(result.to_local()))
        made.bits.append(f"{result.placements} {_digest(result.to_local())}")
        made.same.append(_digest(result.full_tensor()))
    elif isinstance(result, torch.Tensor):
        made.bits.append(_digest(result.detach()))
    else:
        made.same.append(repr(result))


def _digest(tensor: torch.Tensor) -> str:
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    memory = numbers.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if numbers.numel() else b""
    return f"{tuple(tensor.shape)} {hashlib.sha256(memory).hexdigest()[:16]}"


@contextmanager
def kernels(has_them: bool) -> Iterator[None]:
    """All ranks ask each other anew what they have, and this one has compiled kernels or not."""
    with pytest.MonkeyPatch.context() as patch, agreed_facts.asked_anew("kernels or not"):
        if not has_them:
            patch.setattr(library, "_library", lambda: None)
        yield


def _use_alone(beside: DTensor) -> None:
    """What ranks do that log something: tensors of the same shape, of which they have all."""
    mesh = beside.device_mesh
    if mesh.get_coordinate() is None or not beside.numel():
        return
    with torch.no_grad():
        mine = DTensor.from_local(torch.ones(beside.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
        found = [
            mine.sum(),
            mine.flatten(),
            mine.mean(-1) if mine.dim() else mine,
            mine[..., :1] if mine.dim() else mine,
        ]
        found += [mine.amax(0), mine.unsqueeze(0).expand(2, *mine.shape)] if mine.dim() else []
        assert sum(float(one.sum()) for one in found) > 0


@contextmanager
def perturbed() -> Iterator[None]:
    """This rank keeps what it sees, collects garbage when it likes, has memory of another shape, uses alone what is
    replicated, and is slow."""
    dice, held, busy = random.Random(7), [], []

    def interfere(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _torch.tracing() or busy:
            return
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, DTensor)]
        with torch.no_grad():
            held.extend(dice.choice([tensor, tensor.to_local()]) for tensor in tensors)
        held.append(torch.empty(dice.randrange(1 << 12)))
        if len(held) > 400:
            del held[dice.randrange(len(held)) :]
        if dice.random() < 0.005:
            gc.collect()
        if tensors and dice.random() < 0.3 and not torch.is_inference_mode_enabled():
            busy.append(True)
            _use_alone(dice.choice(tensors))
            busy.pop()

    def dawdle(operator: _torch.Operator, args: tuple[Any, ...], group: dist.ProcessGroup) -> None:
        if dice.random() < 0.1:
            time.sleep(0.002 * dice.random())

    ends = [installation.observe(interfere), comm.observe(dawdle)]
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        for end in ends:
            end()
