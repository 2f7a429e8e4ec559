"""Ranks that do not give one tensor are told so, all of them, and none waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.training import same_data
from convmesh.training.same_data import FIRST_CALLS, checksum
from tests.harness import Pool

NAMES = ("data", "h")
WHOLE = torch.arange(4 * 6 * 5, dtype=torch.float64).view(4, 6, 5)
THE_ODD_ONE = 3


class Lazy:
    """An array of which only parts can be read."""

    def __init__(self, array: torch.Tensor):
        self._array, self.shape = array.numpy(), array.shape

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        return self._array[where]


def changed(at: tuple[int, ...]) -> torch.Tensor:
    other = WHOLE.clone()
    other[at] += 1
    return other


# What most ranks give, what the odd one gives, and what all of them are told.
ARRAYS: dict[str, tuple[Any, Any, str]] = {
    "shape": (WHOLE, WHOLE[:, :5], r"ranks 0, 1, 2: tensor \(4, 6, 5\).*\n  rank 3: tensor \(4, 5, 5\)"),
    "as many": (WHOLE, WHOLE.view(6, 4, 5), "different shapes"),
    "type": (WHOLE, WHOLE.float(), r"rank 3: tensor \(4, 6, 5\) torch.float32"),
    "gradient": (WHOLE, WHOLE.clone().requires_grad_(), "rank 3: .*requires a gradient"),
    "memory format": (WHOLE[None], WHOLE[None].to(memory_format=torch.channels_last), "rank 3: .*channels_last"),
    "one value": (WHOLE, changed((0, 0, 0)), "different values.*\n  ranks 0, 1, 2: .*checksum"),
    "order": (WHOLE, WHOLE.flip(0), "different values"),
    "numpy": (WHOLE.numpy(), changed((0, 5, 4)).numpy(), "different values"),
    "numpy shape": (WHOLE.numpy(), WHOLE[:3].numpy(), r"rank 3: array \(3, 6, 5\)"),
    "kind": (WHOLE, Lazy(WHOLE), "rank 3: file"),
    "file": (Lazy(WHOLE), Lazy(changed((0, 5, 4))), "different values"),  # where rank 3 has a copy of rank 1's part
}


def begin() -> None:
    """As if no rank had made a tensor yet."""
    same_data._calls.get().clear()


def refused(words: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(convmesh.ShardingError, match=words) as caught:
        attempt()
    assert "remedy: " in str(caught.value)


def check_shard(mesh: DeviceMesh, name: str) -> None:
    begin()
    most, odd, words = ARRAYS[name]
    array = odd if dist.get_rank() == THE_ODD_ONE else most
    refused(words, lambda: convmesh.shard(array, mesh, h=len(array.shape) - 2))
    assert torch.equal(convmesh.shard(WHOLE, mesh, h=1).full_tensor(), WHOLE)  # the next call works


def test_arrays_that_differ(pool: Pool) -> None:
    pool.run_cases(check_shard, list(ARRAYS), mesh=(2, 2), names=NAMES)


def check_from_region(mesh: DeviceMesh) -> None:
    begin()

    def attempt(words: str, most: torch.Tensor, odd: torch.Tensor) -> None:
        part = odd if dist.get_rank() == THE_ODD_ONE else most
        refused(words, lambda: convmesh.from_region(part, tuple(WHOLE.shape), mesh, h=1))

    here = WHOLE[convmesh.region(tuple(WHOLE.shape), mesh, h=1)]
    attempt(r"do not fit\n  rank 3: .*has shape \(4, 3, 5\), not \(4, 2, 5\)", here, here[:, :2])
    attempt("rank 3: .*float32", here, here.float())
    attempt("different values", here, here + 1)
    shape = (4, 5, 5) if dist.get_rank() == 1 else (4, 6, 5)  # of both it would have 3
    refused(r"rank 1: \(4, 5, 5\)", lambda: convmesh.from_region(WHOLE[:, :3], shape, mesh, data=1))
    own = WHOLE[convmesh.region(tuple(WHOLE.shape), mesh, data=0, h=1)] + dist.get_rank()
    convmesh.from_region(own, tuple(WHOLE.shape), mesh, data=0, h=1)  # each rank has a part of its own


def test_regions_that_differ(pool: Pool) -> None:
    pool.run(check_from_region, mesh=(2, 2), names=NAMES)


def check_later(mesh: DeviceMesh) -> None:
    """Shapes at once in every call, values in the first ones only, but for `check=True`."""
    begin()
    odd = dist.get_rank() == THE_ODD_ONE
    for _ in range(2 * FIRST_CALLS + 1):  # of which some are powers of two
        convmesh.shard(WHOLE, mesh)
    refused(r"\(3, 6, 5\)", lambda: convmesh.shard(WHOLE[:3] if odd else WHOLE, mesh))
    convmesh.shard(WHOLE + odd, mesh)
    with convmesh.enable(check=True):
        refused("different values", lambda: convmesh.shard(WHOLE + odd, mesh))
    refused("different values", lambda: [convmesh.shard(WHOLE + odd, mesh) for _ in range(8 * FIRST_CALLS)])


def test_values_are_compared_ever_less_often(pool: Pool) -> None:
    pool.run(check_later, mesh=(4,), names=("all",))


def check_left_out(world: DeviceMesh) -> None:
    """Ranks 0 and 2, which are in no mesh, neither wait nor fail; ranks of different meshes have different data."""
    begin()
    mesh = DeviceMesh("cpu", torch.tensor([1, 3]), mesh_dim_names=("h",))
    array = changed((0, 0, 0)) if dist.get_rank() == THE_ODD_ONE else WHOLE
    if mesh.get_coordinate() is None:
        assert convmesh.shard(array, mesh, h=1).to_local().numel() == 0
    else:
        refused("ranks? 1: .*\n  ranks? 3: ", lambda: convmesh.shard(array, mesh, h=1))
    own = WHOLE * world.get_local_rank("data")
    assert torch.equal(convmesh.shard(own, world["h"], h=1).full_tensor(), own)


def test_ranks_outside_of_the_mesh(pool: Pool) -> None:
    pool.run(check_left_out, mesh=(2, 2), names=NAMES)


def check_loader(mesh: DeviceMesh, name: str) -> None:
    odd = dist.get_rank() == THE_ODD_ONE
    good = [torch.full((6, 5), float(number)) for number in range(8)]

    def load(samples: list[torch.Tensor], seed: int = 0) -> None:
        for _ in convmesh.loader(samples, mesh, batch_size=4, dims={"data": 0, "h": 1}, shuffle=True, seed=seed):
            pass

    if name == "count":
        refused("rank 3: 7 samples", lambda: load(good[:7] if odd else good))
    elif name == "seed":
        refused("rank 3: .*seed=1", lambda: load(good, int(odd)))
    elif name == "first shape":
        refused(r"rank 3: .*shapes \(\(6, 4\),\)", lambda: load([one[:, :4] for one in good] if odd else good))
    else:  # read by two of the four ranks
        refused(r"ranks?.*: .*sample 5 has shapes \(\(5, 5\),\).*; remedy: pad", lambda: load([*good[:5], good[5][:5]]))
    load(good)


def test_samples_that_differ(pool: Pool) -> None:
    pool.run_cases(check_loader, ["count", "seed", "first shape", "one sample"], mesh=(2, 2), names=NAMES)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 10_000])
def test_checksums_tell_bits_and_their_order(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(2, (size,), generator=generator).to(dtype)
    assert checksum(tensor) == checksum(tensor.clone()) == checksum(torch.stack([tensor, tensor], 1)[:, 0])
    for at in {0, size // 2, size - 1} if size else ():
        other = tensor.clone()
        other[at] = 1 - other[at].to(torch.complex128).real
        assert checksum(other) != checksum(tensor)
    if size > 1:
        assert checksum(tensor.flip(0)) != checksum(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 64, 4096, 100_000])
def test_checksums_tell_signs(dtype: torch.dtype, size: int) -> None:
    """Which are the uppermost bits: of two products together nothing would be left of them."""
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {checksum(tensor), checksum(-tensor)}
    for pair in ([0, 1], [0, size - 1], [size // 2 - 1, size - 1])[: size // 2]:
        other = tensor.clone()
        other[pair] *= -1
        assert checksum(other) != checksum(tensor)
    assert len(found) == 2


def late(mesh: DeviceMesh) -> None:
    for number in range(40):
        values = torch.full((4,), -1.0 if number > 36 and mesh.get_rank() == 3 else float(number))
        convmesh.shard(values, mesh)


def test_simulated_ranks_are_always_compared() -> None:
    with pytest.raises(convmesh.ShardingError, match="different values where they should be equal"):
        convmesh.simulate(late, (2, 2), NAMES)


def test_checksums_tell_patterns_whose_sums_are_equal() -> None:
    """Masks that lie elsewhere have the same bits, and often the same sums of rows and of columns, of any length."""
    masks = []
    for at in (0, 31, 4065, 4096, 8192 - 31):
        masks.append(torch.zeros(4 * 4096, dtype=torch.uint8))
        masks[-1][at : at + 100] = 1
    rows, columns = torch.meshgrid(torch.arange(64), torch.arange(4096), indexing="ij")
    masks += [((rows + columns) % 2 == phase).to(torch.uint8) for phase in (0, 1)]
    masks += [(rows % 64 == line % 64).to(torch.uint8) for line in (columns, 63 - columns)]
    assert len({checksum(mask) for mask in masks}) == len(masks)


def test_a_large_array_is_compared_by_asample() -> None:
    from convmesh.training.arrays import _SAMPLED, sample

    array = np.zeros((3 * _SAMPLED // 64, 64), dtype=np.uint8)
    assert 0 < sample(array).numel() <= _SAMPLED
    assert sample(np.zeros(())).shape == ()
    assert sample(np.zeros((0, 3))).shape == (0, 3)
