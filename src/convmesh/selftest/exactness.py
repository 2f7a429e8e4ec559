"""Compares one function per operator family, sharded, with one device: it must be as exact as that device is itself."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from .. import _torch
from ..comm import CommunicationError
from ..sharding import installation, registry
from .functions import ALL_FUNCTIONS, RANDOM, SHAPE

# A sharded result may have this multiple of one device's error, plus this many units of roundoff: sums are
# added in another order. A wrong element of a halo is off by about the scale itself.
TIMES, ROUNDINGS = 8, 100
DTYPES = (torch.float64, torch.float32)


@dataclass(frozen=True)
class Exactness:
    """How far a function's results and gradients are from those of one device."""

    function: str
    dtype: str
    mesh: tuple[int, ...]
    families: frozenset[str] = frozenset()  # the operator families of the rules that ran
    error: float = 0.0  # the greatest difference from one device, as a fraction of what is allowed
    failure: str = ""  # the traceback, if it raised

    @property
    def right(self) -> bool:
        return not self.failure and self.error <= 1


@dataclass
class Example:
    """A function, its plain inputs on this device, and the results to compare sharded ones with."""

    name: str
    device: torch.device
    dtype: torch.dtype
    leaves: list[torch.Tensor] = field(init=False)
    wanted: list[torch.Tensor] = field(init=False)
    allowed: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.function, shapes = ALL_FUNCTIONS[self.name]
        generator = torch.Generator().manual_seed(3)
        made = [torch.randn(shape, generator=generator) for shape in (SHAPE, *shapes)]
        self.leaves = [tensor.to(self.device, self.dtype) for tensor in made]
        self.wanted = [one.detach() for one in results(self.function, self.leaves)]
        drawn = self.name in RANDOM  # in another dtype other numbers are drawn
        exact = self.wanted if drawn else results(self.function, [tensor.double() for tensor in made])
        self.allowed = [self._allowed(*pair) for pair in zip(self.wanted, exact, strict=True)]

    def _allowed(self, found: torch.Tensor, exact: torch.Tensor) -> float:
        """The greatest error that is allowed, for one device's result and the exact one (in float64)."""
        exact = exact.detach().to(self.device, torch.float64)
        scale = exact.abs().max().item()
        return TIMES * (found - exact).abs().max().item() + ROUNDINGS * torch.finfo(self.dtype).eps * scale

    def placed(self, mesh: DeviceMesh, sharded: Sequence[int]) -> list[DTensor]:
        """Return the inputs on a mesh: its dimensions shard the dimensions `sharded` of the first one."""
        first, *others = self.leaves
        over_space = distribute_tensor(first, mesh, [Shard(dim) for dim in sharded], src_data_rank=None)
        return [over_space, *(distribute_tensor(leaf, mesh, src_data_rank=None) for leaf in others)]

    def error(self, found: Sequence[torch.Tensor]) -> float:
        """Return this rank's greatest error, as a fraction of what is allowed. All ranks must call this."""
        return max(_error(*one) for one in zip(found, self.wanted, self.allowed, strict=True))


def results(function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the function's output and its gradients."""
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, _numbers(output) if output.dim() else None)]


def _numbers(like: torch.Tensor) -> torch.Tensor:
    """Return fixed values for the output's gradient, with the placements that it needs."""
    numbers = torch.linspace(-1, 2, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)
    if not isinstance(like, DTensor):
        return numbers
    return distribute_tensor(numbers, like.device_mesh, _summed(like), src_data_rank=None)


def _summed(tensor: DTensor) -> list[Placement]:
    """The tensor's placements, with Replicate() in place of Partial."""
    return [Replicate() if isinstance(one, Partial) else one for one in tensor.placements]


def _error(found: Any, wanted: torch.Tensor, allowed: float) -> float:
    """Return one result's greatest error on this rank, as a fraction of what is allowed."""
    assert isinstance(found, DTensor)
    assert found.shape == wanted.shape, f"a result of {tuple(found.shape)}, and one device has {tuple(wanted.shape)}"
    placements = _summed(found)
    mine = found.redistribute(placements=placements).to_local().detach()
    expected = distribute_tensor(wanted, found.device_mesh, placements, src_data_rank=None).to_local()
    if not mine.numel():
        return 0.0
    difference = (mine.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max().item()
    return difference / allowed if allowed else float(difference > 0) * 2


def check(name: str, dtype: torch.dtype, mesh: DeviceMesh, dims: Sequence[int], device: torch.device) -> Exactness:
    """Return this rank's verdict on a function. An exception is a verdict too, unless communication failed."""
    known, families = registry.declared(), set()

    def ran(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if operator in known:
            families.add(known[operator].family)

    about = name, str(dtype).removeprefix("torch."), tuple(mesh.shape)
    try:
        example = Example(name, device, dtype)
        placed = example.placed(mesh, dims)
        end = installation.observe(ran)
        try:
            found = results(example.function, placed)
        finally:
            end()
        return Exactness(*about, frozenset(families), example.error(found))
    except CommunicationError:
        raise
    except Exception:
        return Exactness(*about, frozenset(families), failure=traceback.format_exc(limit=-3))


def worst(verdicts: Sequence[Exactness]) -> Exactness:
    """Return the worst of all ranks' verdicts on one function."""
    failed = [one for one in verdicts if one.failure]
    return failed[0] if failed else max(verdicts, key=lambda one: one.error)
