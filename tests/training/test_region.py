"""Every rank reads its own region, and the regions make the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import convmesh
from tests.compare import same_on_all_ranks
from tests.harness import Pool

NAMES = ("data", "h")
WHOLE = torch.arange(3 * 2 * 5 * 7, dtype=torch.float64).view(3, 2, 5, 7)


class Spy:
    """An array that writes down how much was read of it, and cannot be read at once."""

    def __init__(self, array: Any):
        self._array = array
        self.shape = array.shape
        self.read: list[tuple[slice, ...]] = []

    def __getitem__(self, where: tuple[slice, ...]) -> Any:
        assert isinstance(where, tuple)
        assert all(isinstance(part, slice) for part in where)
        self.read.append(where)
        return self._array[where]

    @property
    def elements_read(self) -> int:
        return sum(int(np.prod([len(range(*part.indices(10**9))) for part in where])) for where in self.read)


def check_shard(mesh: DeviceMesh, dims: dict[str, int]) -> None:
    spy = Spy(WHOLE.numpy())
    from_array = convmesh.shard(spy, mesh, **dims)
    from_tensor = convmesh.shard(WHOLE, mesh, **dims)
    where = convmesh.region(WHOLE.shape, mesh, **dims)
    from_part = convmesh.from_region(WHOLE[where].numpy(), tuple(WHOLE.shape), mesh, **dims)
    for tensor in (from_array, from_tensor, from_part):
        assert torch.equal(tensor.full_tensor(), WHOLE)
        assert convmesh.region(tensor) == where
        assert tensor.placements == tuple(
            Shard(dims[name] % 4) if name in dims else Replicate() for name in NAMES[: mesh.ndim]
        )
    assert spy.elements_read == from_array.to_local().numel()
    assert from_tensor.to_local().untyped_storage().nbytes() == from_tensor.to_local().nbytes
    assert convmesh.shard(WHOLE.clone().requires_grad_(), mesh, **dims).is_leaf
    last = convmesh.shard(WHOLE.to(memory_format=torch.channels_last), mesh, **dims)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert last.to_local().is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last.full_tensor(), WHOLE)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 4), (4, 1)])
def test_parts_make_the_whole(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [{}, {"data": 0}, {"data": 0, "h": 2}, {"h": -1}, {"data": 3, "h": 1}, {"h": 0, "data": 2}]
    cases += [{"h": 3, "data": -1}]
    pool.run_cases(check_shard, cases, mesh=mesh, names=NAMES)


def check_errors(mesh: DeviceMesh) -> None:
    def refused(words: str, **dims: Any) -> None:
        for attempt in (
            lambda: convmesh.shard(WHOLE, mesh, **dims),
            lambda: convmesh.region(tuple(WHOLE.shape), mesh, **dims),
        ):
            with pytest.raises(convmesh.ShardingError, match=words) as caught:
                attempt()
            assert "remedy" in str(caught.value)

    refused(r"no dimension 'w', only \('data', 'h'\)", w=3)
    refused("h=4 is no dimension of a tensor with 4", h=4)
    refused("h=-5 is no dimension", h=-5)
    refused("h='2' is no dimension", h="2")
    with pytest.raises(convmesh.ShardingError, match=r"has shape \(2, 2, 5, 7\), not \(3, 2, 5, 7\)|has shape \(1, 2"):
        convmesh.from_region(WHOLE, tuple(WHOLE.shape), mesh, data=0)
    with pytest.raises(convmesh.ShardingError, match="DTensor already"):
        convmesh.shard(convmesh.shard(WHOLE, mesh), mesh)
    pending = DTensor.from_local(WHOLE, mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(convmesh.ShardingError, match="Partial"):
        convmesh.region(pending)
    assert torch.equal(convmesh.shard(WHOLE, mesh, data=0).full_tensor(), WHOLE)  # the next call works


def check_nameless(mesh: DeviceMesh) -> None:
    with pytest.raises(convmesh.ShardingError, match="have no names"):
        convmesh.shard(WHOLE, mesh, h=2)
    assert torch.equal(convmesh.shard(WHOLE, mesh).to_local(), WHOLE)


def test_bad_arguments(pool: Pool) -> None:
    pool.run(check_errors, mesh=(2, 2), names=NAMES)
    pool.run(check_nameless, mesh=(2, 2))


class Volumes:
    """Memory-mapped volumes with labels, opened again in every process that reads them."""

    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        self.spies: list[Spy] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Spy, Spy]:
        opened = tuple(Spy(np.load(self.folder / f"{kind}{index}.npy", mmap_mode="r")) for kind in ("x", "y"))
        self.spies += opened
        return opened[0], opened[1]


def check_loader(mesh: DeviceMesh, folder: Path, shuffle: bool, drop_last: bool) -> list[Any]:
    volumes = Volumes(folder, 7)
    dims = ({"data": 0, "h": 2}, {"data": 0, "h": 1})
    batches = convmesh.loader(volumes, mesh, batch_size=3, dims=dims, shuffle=shuffle, drop_last=drop_last)
    seen = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        volumes.spies.clear()
        found = list(batches)
        assert len(found) == len(batches) == (2 if drop_last else 3)
        seen.append([(x.full_tensor(), y.full_tensor()) for x, y in found])
        for x, y in found:
            assert x.placements == (Shard(0), Shard(2))
            assert y.placements == (Shard(0), Shard(1))
        read = sum(spy.elements_read for spy in volumes.spies)
        assert read == sum(x.to_local().numel() + y.to_local().numel() for x, y in found)
    return seen


@pytest.mark.parametrize(("shuffle", "drop_last"), [(False, False), (True, True)])
def test_batches_of_memory_maps_that_no_rank_reads_whole(
    pool: Pool, tmp_path: Path, shuffle: bool, drop_last: bool
) -> None:
    generator = np.random.default_rng(0)
    volumes = [(generator.normal(size=(2, 6, 4)), generator.integers(3, size=(6, 4))) for _ in range(7)]
    for index, (x, y) in enumerate(volumes):
        np.save(tmp_path / f"x{index}.npy", x)
        np.save(tmp_path / f"y{index}.npy", y)
    first = same_on_all_ranks(pool.run(check_loader, tmp_path, shuffle, drop_last, mesh=(2, 2), names=NAMES))
    orders = []
    for epoch in first:
        order = [index for x, _ in epoch for one in x for index, v in enumerate(volumes) if np.array_equal(one, v[0])]
        targets = [one for _, y in epoch for one in y]
        assert all(np.array_equal(target, volumes[index][1]) for target, index in zip(targets, order, strict=True))
        assert len(set(order)) == len(order) == (6 if drop_last else 7)
        orders.append(order)
    assert (orders[0] != orders[1]) == shuffle


def check_bad_samples(mesh: DeviceMesh) -> None:
    def load(samples: list[Any], dims: Any) -> list[Any]:
        return list(convmesh.loader(samples, mesh, batch_size=4, dims=dims))

    with pytest.raises(convmesh.ShardingError, match=r"sample 1 has shapes \(\(5,\),\), and the first one \(\(4,\),\)"):
        load([torch.zeros(4), torch.zeros(5)], {"h": 1})
    with pytest.raises(convmesh.ShardingError, match="a sample has 1 arrays, and dims speaks of 2"):
        load([torch.zeros(4)], [{"h": 1}, {"h": 1}])
    with pytest.raises(convmesh.ShardingError, match="sharded differently along the batch"):
        load([(torch.zeros(4), torch.zeros(4))], [{"data": 0}, {"h": 1}])
    (batch,) = load([torch.full((4,), float(n)) for n in range(3)], {"h": 1})
    assert torch.equal(batch.full_tensor(), torch.arange(3.0)[:, None].expand(3, 4))


def test_bad_samples(pool: Pool) -> None:
    pool.run(check_bad_samples, mesh=(2, 2), names=NAMES)
