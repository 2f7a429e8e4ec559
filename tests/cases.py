"""Random convolutions on random meshes, and what one process makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import convmesh
from convmesh.ops._core import tiles
from convmesh.ops.convolution import gathered, halo_taps
from tests.compare import assert_close

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 4), (4, 1), (2, 1), (1, 2)]


@dataclass(frozen=True)
class Case:
    """A convolution, where its operands lie, and the seed of its numbers. Placements are 'R', 'P' or a dimension."""

    seed: int
    mesh: tuple[int, ...]
    batch: int
    channels: tuple[int, int]
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    bias: bool
    dtype: torch.dtype
    channels_last: bool
    input: tuple[Any, ...]
    weight: tuple[Any, ...]
    bias_at: tuple[Any, ...]
    gradient: tuple[Any, ...] | None  # None: as the output comes
    needs: tuple[bool, bool]  # gradients of input and weight

    @property
    def geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups


def random_case(seed: int, mesh: tuple[int, ...] | None = None) -> Case:
    """A convolution that has an output; sizes are small so that shards are uneven, empty and thinner than halos."""
    rng = random.Random(seed)
    spatial = rng.choice([1, 2, 2, 2, 3])
    most = {1: 24, 2: 13, 3: 7}[spatial]
    while True:
        groups = rng.choice([1, 1, 1, 2, 3, 4])
        kernel = tuple(rng.choice([1, 2, 3, 3, 4, 5]) for _ in range(spatial))
        stride = tuple(rng.choice([1, 1, 2, 3, 4]) for _ in range(spatial))
        dilation = tuple(rng.choice([1, 1, 1, 2, 3]) for _ in range(spatial))
        padding = tuple(rng.choice([0, 0, 1, 2, 3, 5]) for _ in range(spatial))
        size = tuple(rng.randint(1, most) for _ in range(spatial))
        transposed = rng.random() < 0.35
        extra = tuple(rng.randrange(max(s, d)) if transposed else 0 for s, d in zip(stride, dilation, strict=True))
        conv = convmesh.geometry.Convolution(stride, padding, dilation, transposed, extra, groups)
        if min(conv.output_size(size, kernel)) > 0:
            break
    mesh = mesh or rng.choice(MESHES)
    per_group = (rng.randint(1, 3), rng.randint(1, 3))
    dtype = rng.choice([torch.float64] * 6 + [torch.float32, torch.bfloat16])
    dims = spatial + 2
    anywhere: list[Any] = [*range(dims), *range(2, dims), "R", "P"]
    return Case(
        seed, mesh, rng.choice([0, 1, 2, 3, 5]), (per_group[0] * groups, per_group[1] * groups), groups,
        size, kernel, stride, padding, dilation, transposed, extra, rng.random() < 0.7, dtype,
        spatial > 1 and rng.random() < 0.2,
        tuple(rng.choice(anywhere) for _ in mesh),
        tuple(rng.choice(["R", "R", "R", 0, 1, "P"]) for _ in mesh),
        tuple(rng.choice(["R", "R", 0]) for _ in mesh),
        None if rng.random() < 0.6 else tuple(rng.choice(anywhere) for _ in mesh),
        rng.choice([(True, True)] * 4 + [(True, False), (False, True)]),
    )  # fmt: skip


def operands(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)

    inputs, outputs = case.channels
    weight = (inputs, outputs // case.groups) if case.transposed else (outputs, inputs // case.groups)
    conv = convmesh.geometry.Convolution(*case.geometry)
    made = {
        "input": numbers(case.batch, inputs, *case.size),
        "weight": numbers(*weight, *case.kernel),
        "bias": numbers(outputs),
        "gradient": numbers(case.batch, outputs, *conv.output_size(case.size, case.kernel)),
    }
    if case.channels_last:
        format = {4: torch.channels_last, 5: torch.channels_last_3d}[made["input"].dim()]
        made["input"] = made["input"].contiguous(memory_format=format)
    return made


def place(tensor: torch.Tensor, mesh: DeviceMesh, at: tuple[Any, ...]) -> DTensor:
    """Like `distribute_tensor` without its broadcast, and with pending sums that really are sums of different terms."""
    placements: list[Placement] = [Shard(p) if isinstance(p, int) else Replicate() for p in at]
    whole = [Partial() if p == "P" else placement for p, placement in zip(at, placements, strict=True)]
    placed = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    local = placed.to_local()
    for mesh_dim, p in enumerate(at):
        if p == "P":
            # The ranks' terms are 2, -1, -1/2, ... of the value, and rank 0 makes up for the rest: exact in binary.
            here, size = mesh.get_local_rank(mesh_dim), mesh.size(mesh_dim)
            others = [-(2.0 ** (1 - other)) for other in range(1, size)]
            local = local * (1 - sum(others) if here == 0 else others[here - 1])
    return DTensor.from_local(local, mesh, whole, run_check=False, shape=tensor.shape, stride=tensor.stride())


def one_process(case: Case, magnitudes: bool = False) -> dict[str, Any]:
    """In float64: the exact answer, up to its own rounding; or how large the terms are that it sums up."""
    made = {name: tensor.double() for name, tensor in operands(case).items()}
    made = {name: tensor.abs() if magnitudes else tensor for name, tensor in made.items()}
    x, w, b = made["input"].requires_grad_(), made["weight"].requires_grad_(), made["bias"].requires_grad_()
    y = torch.convolution(x, w, b if case.bias else None, *case.geometry)
    y.backward(made["gradient"])
    return {"output": y.detach(), "input": x.grad, "weight": w.grad, "bias": b.grad}


def check(mesh: DeviceMesh, case: Case) -> None:
    """Run the case on the mesh, and compare output and gradients with one process."""
    made, expected = operands(case), one_process(case)
    with convmesh.enable(), _border(case):
        x = place(made["input"], mesh, case.input).requires_grad_(case.needs[0])
        w = place(made["weight"], mesh, case.weight).requires_grad_(case.needs[1])
        b = place(made["bias"], mesh, case.bias_at).requires_grad_() if case.bias else None
        y = torch.convolution(x, w, b, *case.geometry)
        gradient = place(made["gradient"], mesh, case.gradient) if case.gradient else None
        if gradient is None:
            gradient = place(made["gradient"], mesh, places_of(y))
        y.backward(gradient)
    scales = _scales(case)
    _compare("output", y.detach(), expected["output"], scales["output"])
    for name, leaf, needed in (("input", x, case.needs[0]), ("weight", w, case.needs[1]), ("bias", b, case.bias)):
        if leaf is not None and needed:
            _compare(name, leaf.grad, expected[name], scales[name])
            _check_placed(name, leaf, case)


@contextmanager
def _border(case: Case) -> Iterator[None]:
    """Of three cases one is computed as it pays, one has its border added tap by tap, and one in strips, however wide
    and small it is.

    Strips need something inside.
    """
    usual = (tiles.LARGEST_BORDER, halo_taps.FEWEST_CHANNELS, gathered.FEW_ELEMENTS)
    by_tap = case.seed % 3 == 1 and case.dtype != torch.bfloat16
    if case.seed % 3:
        tiles.LARGEST_BORDER, halo_taps.FEWEST_CHANNELS = (1.0, 1) if by_tap else (0.99, 10**9)
        gathered.FEW_ELEMENTS = 0
    try:
        yield
    finally:
        tiles.LARGEST_BORDER, halo_taps.FEWEST_CHANNELS, gathered.FEW_ELEMENTS = usual


def _scales(case: Case) -> dict[str, float | None]:
    """What the tolerance is relative to: the greatest value (None), but in bfloat16 the terms that were summed.

    Each rank rounds its part of a sum to bfloat16's 3 digits before they are added, and the parts of a pending sum
    are up to 3.75 times as large as their sum. Where terms cancel, that is visible, and it is not an error.
    """
    if case.dtype != torch.bfloat16:
        return dict.fromkeys(("output", "input", "weight", "bias"))
    largest = {
        name: t.max().item() if t is not None and t.numel() else 0.0 for name, t in one_process(case, True).items()
    }
    return {name: 2 * value for name, value in largest.items()}


def _compare(name: str, actual: Any, expected: Any, scale: float | None) -> None:
    local, shape = actual.to_local(), actual.shape
    assert local.shape == local_shape(actual), f"{name}: local shape {local.shape} of {shape}, {actual.placements}"
    try:
        assert_close(actual.full_tensor(), expected, scale)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def local_shape(tensor: DTensor) -> torch.Size:
    """What DTensor itself says this rank's part should be."""
    whole = torch.empty(tensor.shape, device="meta")
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            pieces = whole.chunk(tensor.device_mesh.size(mesh_dim), placement.dim)
            here = tensor.device_mesh.get_local_rank(mesh_dim)
            whole = pieces[here] if here < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole.shape


def _check_placed(name: str, leaf: DTensor, case: Case) -> None:
    """A gradient lies where its tensor does; one of a tensor that is not sharded may also be a pending sum,
    and that of a weight or bias sharded."""
    assert leaf.grad is not None
    if name == "bias":
        return  # its own placements do not reach the backward operator: it goes with the weight
    for tensor, gradient in zip(leaf.placements, leaf.grad.placements, strict=True):
        fits = gradient == tensor if isinstance(tensor, Shard) else name == "weight" or not isinstance(gradient, Shard)
        assert fits, f"{name} at {leaf.placements}, its gradient at {leaf.grad.placements}"


def letter(placement: Placement) -> Any:
    return placement.dim if isinstance(placement, Shard) else "P" if isinstance(placement, Partial) else "R"


def places_of(tensor: DTensor) -> tuple[Any, ...]:
    """Where a tensor is, in the words of `place`."""
    return tuple(letter(p) for p in tensor.placements)
