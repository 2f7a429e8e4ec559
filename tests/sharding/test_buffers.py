"""Tensors that a model makes and fills with sharded values: equal to one process, and none of them whole on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

SHAPE = (2, 3, 8, 5)

Fill = Callable[[torch.Tensor], torch.Tensor]


def front(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(*x.shape[:3], 7, dtype=x.dtype)
    out[..., :5] = x
    return out.sin()


def added_rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.ones((2, 3, 11, 5), dtype=x.dtype, device=x.device)
    out[:, :, 2:10] += x
    return out.sin()


def windows(x: torch.Tensor) -> torch.Tensor:
    out, count = torch.zeros_like(x[0]).new_zeros(x.shape), torch.zeros((1, 1, *x.shape[2:]), dtype=x.dtype)
    for row in (0, 2, 4):
        for column in (0, 1):
            at = (slice(None), slice(None), slice(row, row + 4), slice(column, column + 4))
            out[at] += x[at].sin()
            count[at] += 1
    return out / count


def masked(x: torch.Tensor) -> torch.Tensor:
    out = torch.full(SHAPE, 2.0, dtype=x.dtype)
    out[x > 0] = x[x > 0]
    return out * x


def copied(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(SHAPE, dtype=torch.float64)
    return out.copy_(x).sin()


def one_hot(x: torch.Tensor) -> torch.Tensor:
    labels = (x[:, :1] > 0).long()
    return torch.zeros(2, 4, 8, 5, dtype=x.dtype).scatter_(1, labels, 1).sum(1, keepdim=True) * x


def selected(x: torch.Tensor) -> torch.Tensor:
    out = torch.full((2, 3, 4, 8, 5), torch.pi, dtype=x.dtype)
    for frame in range(3):
        out[:, :, frame] = x * frame
    return out


def permuted(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(2, 5, 8, 3, dtype=x.dtype).permute(0, 3, 2, 1)
    out[:, :, 1:7:2] = x[:, :, 1:7:2]
    return out


def recomputed(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = checkpoint(front, x, use_reentrant=False)
    return result


def numbers_first(x: torch.Tensor) -> torch.Tensor:
    """What was written as a constant is there when a part of the buffer is filled."""
    out = torch.zeros(SHAPE, dtype=x.dtype)
    late = out[:, 1:]
    out[:, :, 3] = 1
    out.mul_(2)
    out[:, :, :2] = x[:, :, :2]
    late[..., 4].mul_(3)
    return out + x


def cast(x: torch.Tensor) -> torch.Tensor:
    out = torch.ones(SHAPE, dtype=torch.float32).to(x).clone()
    out[:, 1:] = x[:, 1:]
    return torch.cat([torch.zeros(2, 1, 8, 5, dtype=x.dtype), out], 1)


def constants(x: torch.Tensor) -> torch.Tensor:
    """A buffer that nothing sharded was written into is a plain tensor to whoever asks."""
    mask = torch.zeros(8, 5, dtype=x.dtype).unsqueeze_(0).squeeze(0)
    mask[2:4] = 1
    mask[0, 0] = 3
    assert int(mask[0, 0]) == 3
    assert mask.view(-1).nonzero().numel() == 11
    assert bool((mask > 0).any())
    assert sum(mask.clone().numpy().ravel()) == sum(map(sum, mask.tolist())) == 13
    assert type(mask + 1) is torch.Tensor
    index = torch.zeros(2, dtype=torch.int64)
    index[1] = 4
    return x[..., index] * mask[:, :1]


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: the lowest frequencies are weighted, all others are zero."""

    def __init__(self, channels: int, modes: int):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(2, channels, channels, modes, modes, dtype=torch.complex128) / channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum, k = torch.fft.rfft2(x), self.modes
        out = torch.zeros(spectrum.shape, dtype=spectrum.dtype, device=x.device)
        out[:, :, :k, :k] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :k, :k], self.weight[0])
        out[:, :, -k:, :k] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -k:, :k], self.weight[1])
        return torch.fft.irfft2(out, s=x.shape[-2:])


class Joint(nn.Module):
    """Text, which is replicated, is written first, and then an image."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Parameter(torch.linspace(-1, 1, 30, dtype=torch.float64).view(3, 2, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_zeros(2, 3, 10, 5)
        out[:, :, :2] = self.text
        out[:, :, 2:] = x
        alone = x.new_ones(2, 3, 1, 5)  # nothing sharded is written into this one
        alone.mul_(self.text[:, :1])
        return out.sin() + alone.cos()


class Filled(nn.Module):
    def __init__(self, fill: Fill):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.float64).view(3, 1, 1))
        self.fill = fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fill(x * self.weight)


def operator_network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), Spectral(4, 2), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1), Spectral(4, 2), nn.Conv2d(4, 1, 1)
    ).double()


FILLS = [front, added_rows, windows, masked, copied, one_hot, selected, permuted, recomputed, numbers_first, cast,
         constants]  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "Fourier neural operator": operator_network,
    "text first": Joint,
    **{fill.__name__: lambda fill=fill: Filled(fill) for fill in FILLS},  # type: ignore[misc]
}


def trained(model: nn.Module, x: torch.Tensor, mesh: DeviceMesh | None) -> list[torch.Tensor]:
    y = model(x.requires_grad_())
    seed = torch.arange(y.numel(), dtype=torch.float64).cos().view(y.shape)
    y.backward(seed if mesh is None else place(seed, mesh, ("R",) * mesh.ndim))
    return [y, x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]


def check(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    name, at = case
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = trained(MODELS[name](), x.clone(), None)
    model = convmesh.distribute(MODELS[name](), mesh)
    actual = trained(model, place(x, mesh, at), mesh)
    for mine, wanted in zip(actual, expected, strict=True):
        assert isinstance(mine, DTensor)
        assert_close(mine.full_tensor(), wanted)
    assert not all(isinstance(placement, Replicate) for placement in actual[0].placements)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(model(place(x, mesh, at)).full_tensor(), expected[0])


@pytest.mark.parametrize(("mesh", "places"), [((3,), [(2,), (0,)]), ((2, 2), [(2, 3), (0, 2), (1, "R")])])
def test_what_is_filled_with_sharded_values_is_sharded(
    pool: Pool, mesh: tuple[int, ...], places: list[tuple[Any, ...]]
) -> None:
    pool.run_cases(check, [(name, at) for name in MODELS for at in places], mesh=mesh)


class Largest(TorchDispatchMode):
    """The number of elements of the largest plain tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does itself is seen here afterwards
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(result) if type(t) is torch.Tensor and not t.is_meta]
        self.count = max([self.count, *(t.untyped_storage().nbytes() // t.element_size() for t in made)])
        return result


def half(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype)
    out[..., : x.shape[3]] = x
    return out


def more_classes(x: torch.Tensor) -> torch.Tensor:
    """Nothing is written into the zeros, and they have another shape than the index."""
    return x.new_zeros(4, 5, 16, 8).scatter(1, x.argmax(1, keepdim=True), 1.0)[:, :3] * x


def largest(mesh: DeviceMesh, at: tuple[Any, ...], fill: Fill) -> tuple[int, int]:
    x = torch.randn(4, 3, 16, 8, dtype=torch.float64)
    with Largest() as whole:
        trained(Filled(fill), x.clone(), None)
    model, placed = convmesh.distribute(Filled(fill), mesh), place(x, mesh, at)
    with Largest() as part:
        y = model(placed.requires_grad_())
        y.backward(y.detach())
    return whole.count, part.count


@pytest.mark.parametrize("at", [(2,), (0,)])
def test_no_rank_makes_all_of_a_buffer(pool: Pool, at: tuple[Any, ...]) -> None:
    for fill in (half, more_classes):
        for whole, part in pool.run(largest, at, fill, mesh=(4,)):
            assert 4 * part <= whole


def on_some_ranks(mesh: DeviceMesh) -> None:
    for name in ("front", "numbers_first", "Fourier neural operator"):
        x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y = MODELS[name]()(x)
        assert_close(convmesh.distribute(MODELS[name](), mesh)(place(x, mesh, (2,))).full_tensor(), y)


def test_ranks_other_than_the_first_have_buffers(pool: Pool) -> None:
    pool.run(on_some_ranks, mesh=(2,), ranks=(1, 3))


def outside(mesh: DeviceMesh) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with convmesh.enable():
        placed = place(x, mesh, (2,))
        with pytest.raises(convmesh.ShardingError, match="plain"):
            windows(placed)
        with convmesh.implicit_replication(mesh):
            result = windows(placed)
            torch.manual_seed(4)
            noisy = placed + torch.randn(x.shape, dtype=x.dtype)
            with torch.device("meta"), convmesh.implicit_replication(mesh):
                assert torch.arange(3).is_meta
                assert torch.zeros(2, 3).is_meta
            assert isinstance(torch.zeros(2, 3), DTensor)
        assert type(torch.zeros(2, 3)) is torch.Tensor
        assert torch.get_default_device() == torch.device("cpu")
    assert_close(result.full_tensor(), windows(x))  # type: ignore[attr-defined]
    torch.manual_seed(4)
    assert_close(noisy.full_tensor(), x + torch.randn(x.shape, dtype=x.dtype))  # type: ignore[attr-defined]


def test_outside_of_a_model_the_same_can_be_asked_for(pool: Pool) -> None:
    pool.run(outside, mesh=(2,))
