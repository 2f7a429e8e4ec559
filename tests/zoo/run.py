"""A network of the zoo on many ranks, against one process: results, gradients, and the sizes of what ranks make."""

from __future__ import annotations

import time
import warnings
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.ops.linalg import attention
from convmesh.ops.random import bernoulli
from tests.gathers import MOST, Sizes
from tests.zoo.network import Layout, Network, tensors


@dataclass
class Found:
    """Of one network on one layout."""

    package: str
    name: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    error: float = 0.0  # the greatest difference, relative to the largest number of the tensor
    largest: float = 0.0  # what a rank makes, relative to the largest activation of one process
    received: float = 0.0  # what reaches a rank at once, likewise
    maker: str = ""
    placed: str = ""
    seconds: float = 0.0
    refused: str = ""
    tolerance: float = 0.0

    @property
    def right(self) -> bool:
        return not self.refused and self.error < self.tolerance

    @property
    def sharded(self) -> bool:
        return self.right and self.largest < 1 and self.received < MOST


def _is_of(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether it may be a parameter or its gradient: in any order, its dimensions merged, or a part."""
    part = len(parameter) > 2 and shape[:2] == parameter[:2] and prod(shape) <= prod(parameter)
    part |= len(parameter) > 2 and shape[2:] == parameter[2:] and prod(shape) == prod(parameter)
    sizes, own = ([size for size in each if size > 1] for each in (shape, parameter))
    fits = len(sizes) == len(own) > 1 and all(a <= b for a, b in zip(sizes, own, strict=True))
    shard = fits and sum(a < b for a, b in zip(sizes, own, strict=True)) == 1
    alike = sorted(sizes) == sorted(own)
    merged = prod(shape) == prod(parameter) and set(accumulate(shape, mul)) <= {1, *accumulate(parameter, mul)}
    return part or shard or alike or merged


# By operator, which argument it may round, and what a number is rounded to.
ROUNDING = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
DOUBLES = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class Activations(Sizes):
    """Sizes of all but parameters, which are replicated, and their gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        given = [*model.parameters(), *model.buffers()]
        self.parameters = {p.numel() * p.element_size() for p in given}
        self.shapes = {tuple(p.shape) for p in given}
        self.single = False  # whether numbers were rounded to float32

    def _note(self, size: int, maker: str) -> None:
        if size > self.largest:
            shape = literal_eval(maker.rpartition(" of shape ")[2])
            if not any(_is_of(shape, parameter) for parameter in self.shapes):
                super()._note(size, maker)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.received_at_once = self.received_at_once, 0
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in ROUNDING and result is not NotImplemented:
            given = args[ROUNDING[func]]
            self.single |= given.dtype in DOUBLES and result.dtype == DOUBLES[given.dtype]
        gathers = "all_gather" in func.name() and result is not NotImplemented
        if self.received_at_once in self.parameters or (gathers and tuple(args[0].shape) in self.shapes):
            self.received_at_once = 0  # a gradient, which a gather may have padded
        self.received_at_once = max(before, self.received_at_once)
        return result


def step(network: Network, model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Results, and gradients of the input and of all parameters."""
    torch.manual_seed(2)
    with torch.set_grad_enabled(network.backward):
        made = list(tensors(network.call(model, x, **network.more())))
        given = [one for one in made if one.requires_grad]
        if network.backward:
            # A number of its own for each element, made of the result itself: the same however that is placed.
            sum(
                (one * (one.detach() * 3).sin()).abs().mean()
                if one.is_complex()
                else (one * (one.detach() * 3).sin()).mean()
                for one in given
            ).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*(one.detach() for one in made), *([] if x.grad is None else [x.grad]), *gradients]


def on_one(network: Network) -> tuple[list[torch.Tensor], Activations]:
    model, x = network.model(), network.numbers()
    with Activations(model) as sizes:
        made = step(network, model, x)
    if any(one.isnan().any() for one in made):
        raise ValueError("not a number: there is nothing to compare")
    if x.requires_grad and (x.grad is None or not x.grad.any()):
        raise ValueError("results do not depend on the input: whatever ranks do would be right")
    if network.single and not sizes.single:
        raise ValueError("nothing is rounded to float32: it must be compared as others are")
    return made, sizes


def on_many(network: Network, mesh: DeviceMesh, dims: Sequence[int]) -> tuple[list[torch.Tensor], Activations, str]:
    warnings.simplefilter("ignore")
    model, x = network.model(), network.numbers()
    with convmesh.enable():
        at = dict(zip(mesh.mesh_dim_names or (), dims, strict=True))
        x = convmesh.shard(x.detach(), mesh, **at).requires_grad_(x.requires_grad)
        # Parameters in messages of their own: of small networks all together are larger than an activation.
        model = convmesh.distribute(model, mesh, bucket_bytes=1)
        with Activations(model) as sizes:
            made = step(network, model, x)
        placed = str(made[0].placements) if isinstance(made[0], DTensor) else "plain"
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in made], sizes, placed


def difference(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """The greatest, relative to the largest number; a gradient of nothing but rounding counts little."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if actual.isnan().any():
        return float("inf")
    return (actual - expected).abs().max().item() / max(expected.abs().max().item(), scale)


def compare(network: Network, layout: Layout, expected: tuple[list[torch.Tensor], Activations]) -> Found:
    mesh, dims = layout
    found = Found(network.package, network.name, mesh, dims, tolerance=network.tolerance)
    started = time.monotonic()
    one, sizes = expected
    # Keys and values of these small configurations would all be gathered, and blocks of random numbers be larger.
    attention.GATHERED_BYTES = 0
    bernoulli.BLOCK = 1 << 9
    torch.manual_seed(0)
    try:
        names = tuple(f"m{number}" for number in range(len(mesh)))
        ranks = convmesh.simulate(lambda m: on_many(network, m, dims), mesh=mesh, names=names)
    except Exception as error:
        found.refused = f"{type(error).__name__}: {error}".strip()
        found.seconds = time.monotonic() - started
        return found
    scale = 1e-6 * max([t.abs().max().item() for t in one if t.numel()], default=1.0)
    for made, many, placed in ranks:
        same = len(made) == len(one)
        errors = [difference(a, b, scale) for a, b in zip(made, one, strict=same)] if same else [float("inf")]
        found.error = max(found.error, *errors)
        if many.largest / sizes.largest >= found.largest:
            found.largest, found.maker = many.largest / sizes.largest, many.maker
        found.received = max(found.received, many.received_at_once / sizes.largest)
        found.placed = placed
    found.seconds = time.monotonic() - started
    return found


def run(network: Network) -> list[Found]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        expected = on_one(network)
        return [compare(network, layout, expected) for layout in network.layouts]
