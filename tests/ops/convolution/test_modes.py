"""Convolution under everything that people wrap around it: compile, autocast, checkpointing, functional transforms."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.utils.checkpoint import checkpoint

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

# Where a (2, 3, 9, 11) image lies on a mesh of these sizes.
LAYOUTS = [((2,), (3,)), ((2, 2), (2, 3)), ((2, 2), (3, 3)), ((2, 2), (0, 3)), ((4,), (2,))]


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def layer(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    made = nn.Conv2d(3, 4, 3, stride=2, padding=1, dtype=dtype)
    return made if mesh is None else distribute_module(made, mesh)


def gradients(module: nn.Module, x: torch.Tensor, run: Any) -> list[torch.Tensor]:
    y = run(module, x)
    y.float().square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad for p in module.parameters())]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def plain(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x)


def checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x, use_reentrant=False)


def autocast(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module(x)


def compiled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(module, fullgraph=True, backend="aot_eager")(x)


def compiled_inductor(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when inductor is imported
        return torch.compile(module, fullgraph=True)(x)


def same_gradients(mesh: DeviceMesh, case: tuple[Any, tuple[Any, ...]]) -> None:
    run, at = case
    dtype = torch.float32 if run is autocast else torch.float64
    x = numbers(2, 3, 9, 11, dtype=dtype)
    expected = gradients(layer(None, dtype), x.clone().requires_grad_(), autocast if run is autocast else plain)
    with convmesh.enable():
        actual = gradients(layer(mesh, dtype), place(x, mesh, at).requires_grad_(), run)
    for a, e in zip(actual, expected, strict=True):
        # Under autocast both sides compute in bfloat16, so that is the rounding they may differ by.
        assert_close(a.bfloat16() if run is autocast else a, e)


@pytest.mark.parametrize("run", [plain, checkpointed, autocast, compiled], ids=lambda run: run.__name__)
@pytest.mark.parametrize(("mesh", "at"), LAYOUTS)
def test_gradients(pool: Pool, run: Any, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run_cases(same_gradients, [(run, at)], mesh=mesh)


@pytest.mark.slow
def test_inductor(pool: Pool) -> None:
    pool.run_cases(same_gradients, [(compiled_inductor, (3,))], mesh=(2,), timeout=200)


def without_gradients(mesh: DeviceMesh, case: tuple[Any, tuple[Any, ...]]) -> None:
    mode, at = case
    x = numbers(2, 3, 9, 11)
    expected = layer(None)(x)
    with convmesh.enable():
        module, sharded = layer(mesh), place(x, mesh, at)
        with mode():
            y = module(sharded)
            assert y.placements == sharded.placements
            assert_close(y.full_tensor(), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(pool: Pool, mode: Any) -> None:
    pool.run_cases(without_gradients, [(mode, (3,))], mesh=(2,))
    pool.run_cases(without_gradients, [(mode, (2, 3))], mesh=(2, 2))


def functional(mesh: DeviceMesh) -> None:
    x, w = numbers(2, 3, 9, 11), numbers(4, 3, 3, 3)

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, w, padding=1).square().sum()

    expected = torch.func.grad(loss, argnums=(0, 1))(x, w)
    with convmesh.enable():
        actual = torch.func.grad(loss, argnums=(0, 1))(place(x, mesh, (3,)), place(w, mesh, ("R",)))
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.full_tensor(), e)


def test_torch_func_grad(pool: Pool) -> None:
    pool.run(functional, mesh=(2,))


def second_order(tensors: tuple[torch.Tensor, ...], geometry: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    x, w, b = tensors
    y = torch.convolution(x, w, b, *geometry)
    gx, gw, gb = torch.autograd.grad((y**3).sum(), (x, w, b), create_graph=True)
    return torch.autograd.grad((gx**2).sum() + (gw**2).sum() + (gb**2).sum(), (x, w, b))


def same_second_order(mesh: DeviceMesh, case: tuple[Any, ...]) -> None:
    transposed, groups, at = case
    geometry = ((2, 1), (1, 2), (1, 2), transposed, (1, 0) if transposed else (0, 0), groups)
    made = (numbers(2, 6, 9, 11), numbers(6, 6 // groups, 3, 2), numbers(6))
    expected = second_order(tuple(t.clone().requires_grad_() for t in made), geometry)
    replicated = ("R",) * len(at)
    with convmesh.enable():
        placed = [
            place(t, mesh, where).requires_grad_() for t, where in zip(made, (at, replicated, replicated), strict=True)
        ]
        actual = second_order(tuple(placed), geometry)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a.full_tensor(), e)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
def test_double_backward(pool: Pool, transposed: bool, groups: int) -> None:
    pool.run_cases(same_second_order, [(transposed, groups, at) for at in [(3,), (0,), (2,), (1,)]], mesh=(2,))
    pool.run_cases(same_second_order, [(transposed, groups, at) for at in [(2, 3), (0, 2)]], mesh=(2, 2))


def unbatched(mesh: DeviceMesh) -> None:
    x, w = numbers(3, 9, 11), numbers(4, 3, 3, 3)
    with convmesh.enable():
        y = F.conv2d(place(x, mesh, (2,)), place(w, mesh, ("R",)), padding=1)
    assert y.placements[0].is_shard(2)
    assert_close(y.full_tensor(), F.conv2d(x, w, padding=1))


def test_unbatched_input(pool: Pool) -> None:
    pool.run(unbatched, mesh=(2,))


def same_padding(mesh: DeviceMesh) -> None:
    """An even kernel pads one side more than the other, which torch does by padding first."""
    x, w = numbers(2, 3, 9, 11), numbers(4, 3, 4, 2)
    leaf = x.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own: it makes a padded copy
        expected = F.conv2d(leaf, w, padding="same")
        with convmesh.enable():
            sharded = place(x, mesh, (3,)).requires_grad_()
            y = F.conv2d(sharded, place(w, mesh, ("R",)), padding="same")
            y.square().sum().backward()
    expected.square().sum().backward()
    assert y.placements[0].is_shard(3)
    assert_close(y.full_tensor(), expected)
    assert_close(sharded.grad.full_tensor(), leaf.grad)


def test_same_padding_of_an_even_kernel(pool: Pool) -> None:
    pool.run(same_padding, mesh=(2,))
    pool.run(same_padding, mesh=(4,))


def channels_last(mesh: DeviceMesh, dims: int) -> None:
    format = {2: torch.channels_last, 3: torch.channels_last_3d}[dims]
    x = torch.randn(2, 4, *(8,) * dims).contiguous(memory_format=format)
    w = torch.randn(4, 4, *(3,) * dims)
    convolve = {2: F.conv2d, 3: F.conv3d}[dims]
    with convmesh.enable():
        y = convolve(place(x, mesh, (2,)), place(w, mesh, ("R",)), padding=1)
    expected = convolve(x, w, padding=1)
    assert y.to_local().is_contiguous(memory_format=format)
    assert y.stride() == expected.contiguous(memory_format=format).stride()
    assert_close(y.full_tensor(), expected)
    with convmesh.enable():
        y = convolve(place(x.double(), mesh, (2,)), place(w.double(), mesh, ("R",)), padding=1)
    assert y.stride() == convolve(x.double(), w.double(), padding=1).stride()  # for which not all have a kernel


@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_is_kept(pool: Pool, dims: int) -> None:
    pool.run(channels_last, dims, mesh=(2,))


def outside_of_the_mesh(mesh: DeviceMesh) -> Any:
    """A rank that is not in a tensor's mesh calls the same code, and takes no part."""
    part = DeviceMesh("cpu", torch.tensor([0, 1]))
    x, w = numbers(2, 3, 9, 11), numbers(4, 3, 3, 3)
    with convmesh.enable():
        sharded = distribute_tensor(x, part, [Shard(3)], src_data_rank=None).requires_grad_()
        weight = distribute_tensor(w, part, [Replicate()], src_data_rank=None).requires_grad_()
        y = F.conv2d(sharded, weight, padding=1)
        y.backward(torch.ones_like(y))
    assert y.shape == (2, 4, 9, 11)
    if mesh.get_rank() < 2:
        assert_close(y.full_tensor(), F.conv2d(x, w, padding=1))
        return y.to_local().numel()
    return y.to_local().numel()


def test_ranks_outside_of_the_mesh(pool: Pool) -> None:
    assert pool.run(outside_of_the_mesh, mesh=(4,)) == [2 * 4 * 9 * 6, 2 * 4 * 9 * 5, 0, 0]
