"""Batches of dicts and tuples, of any shapes; where a loader stopped; random numbers that ranks share; file formats."""

from __future__ import annotations

import multiprocessing as mp
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import convmesh
from tests.compare import same_on_all_ranks
from tests.harness import Pool

NAMES = ("data", "h")
IMAGES = np.random.default_rng(0).normal(size=(7, 2, 6, 5))
DIMS = {"image": {"data": 0, "h": 2}}


def sample(number: int) -> dict[str, Any]:
    return {"image": IMAGES[number], "label": number, "weight": number / 2, "seen": number > 3, "file": f"{number}.png",
            "scale": np.float32(number), "box": torch.arange(4) + number}  # fmt: skip


def full(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: full(value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [full(value) for value in batch]
    return batch.full_tensor() if isinstance(batch, DTensor) else batch


def let_have_children() -> None:
    """Ranks of the pool are daemons, which may not start processes that read."""
    mp.current_process()._config["daemon"] = False


def check_fields(mesh: DeviceMesh, workers: int) -> None:
    let_have_children()
    samples = [sample(number) for number in range(7)]
    samples[3] = dict(reversed(samples[3].items()))
    found = list(convmesh.loader(samples, mesh, batch_size=3, dims=DIMS, num_workers=workers))
    assert [list(batch) for batch in found] == [list(samples[0])] * 3
    for batch, numbers in zip(found, ([0, 1, 2], [3, 4, 5], [6]), strict=True):
        assert batch["image"].placements == (Shard(0), Shard(2))
        assert batch["label"].placements == batch["box"].placements == (Shard(0), Replicate())
        whole = full(batch)
        assert np.array_equal(whole["image"], IMAGES[numbers])
        assert torch.equal(whole["label"], torch.tensor(numbers))
        assert torch.equal(whole["weight"], torch.tensor(numbers, dtype=torch.float64) / 2)
        assert torch.equal(whole["seen"], torch.tensor(numbers) > 3)
        assert torch.equal(whole["scale"], torch.tensor(numbers, dtype=torch.float32))
        assert torch.equal(whole["box"], torch.tensor(numbers)[:, None] + torch.arange(4))
        own = [numbers[:2], numbers[2:]][mesh.get_local_rank("data")]
        assert batch["file"] == [f"{number}.png" for number in own]
    pairs = [(value["image"], value["label"], value["file"]) for value in samples]
    dims = {"data": 0, "h": 2}, None, None
    for image, label, file in convmesh.loader(pairs, mesh, batch_size=7, dims=dims):
        assert np.array_equal(image.full_tensor(), IMAGES)
        assert label.full_tensor().tolist() == list(range(7))
        assert file == [value["file"] for value in samples][4 * mesh.get_local_rank("data") :][: len(file)]
    numbers = convmesh.loader(range(5), mesh, batch_size=5, dims={"data": 0})
    assert [batch.full_tensor().tolist() for batch in numbers] == [list(range(5))]


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_are_dicts_and_tuples_with_numbers_and_strings(pool: Pool, workers: int) -> None:
    pool.run(check_fields, workers, names=NAMES)


def check_bad_fields(mesh: DeviceMesh) -> None:
    def refused(words: str, samples: list[Any], dims: Any, **options: Any) -> None:
        with pytest.raises(convmesh.ShardingError, match=words) as caught:
            list(convmesh.loader(samples, mesh, **{"batch_size": 2, "dims": dims, **options}))
        assert "remedy" in str(caught.value)

    both = [sample(0), sample(1)]
    refused("a sample is a dict, and dims is", both, {"data": 0})
    refused(r"a DataLoader has no samples\[index\]", torch.utils.data.DataLoader(IMAGES), DIMS)
    refused("a sample is a ndarray, and dims is", list(IMAGES), DIMS)
    refused(r"a sample has the fields \['image'.*dims speaks of \['picture'\]", both, {"picture": {"data": 0}})
    refused("dims speaks of field 'file', which is a str", both, {"file": {"data": 0}})
    refused("the mesh has no dimension 'w'", both, {"image": {"w": 2}})
    refused("sample 1 has shapes", [sample(0), {"image": IMAGES[1]}], DIMS)
    refused("sample 1 has shapes", [torch.zeros(3), torch.zeros(3, 1)], {"h": 1}, batch_size=1)


def test_fields_that_do_not_fit(pool: Pool) -> None:
    pool.run(check_bad_fields, names=NAMES)


class Growing:
    """Volumes of another shape each, on disk."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return np.load(self.folder / f"{index}.npy", mmap_mode="r"), index


def check_shapes(mesh: DeviceMesh, folder: Path) -> None:
    dims = {"data": 0, "h": 2}, {"data": 0}
    batches = convmesh.loader(Growing(folder), mesh, batch_size=1, dims=dims, shuffle=True)
    seen = []
    for volume, (index,) in ((x, y.full_tensor().tolist()) for x, y in batches):
        assert np.array_equal(volume.full_tensor()[0], np.load(folder / f"{index}.npy"))
        seen.append(index)
    assert sorted(seen) == list(range(4))


def test_volumes_of_different_shapes_one_at_a_time(pool: Pool, tmp_path: Path) -> None:
    for index in range(4):
        np.save(tmp_path / f"{index}.npy", np.random.default_rng(index).normal(size=(2, 3 + 2 * index, 5 - index)))
    pool.run(check_shapes, tmp_path, names=NAMES)


def check_other_ranks(mesh: DeviceMesh) -> None:
    """A mesh of two of the four ranks: the others have nothing, and read nothing."""
    part = DeviceMesh("cpu", [1, 3], mesh_dim_names=("h",))
    inside = part.get_coordinate() is not None
    for batch in convmesh.loader([sample(number) for number in range(3)], part, batch_size=2, dims={"image": {"h": 2}}):
        assert batch["image"].shape[1:] == (2, 6, 5)
        assert (batch["image"].to_local().numel() > 0) == inside
        assert bool(batch["file"]) == inside


def test_ranks_outside_of_the_mesh(pool: Pool) -> None:
    pool.run(check_other_ranks, mesh=(4,))


def check_pinned(mesh: DeviceMesh) -> None:
    """From pinned memory the copy to the device is not waited for."""
    copies = []
    to = torch.Tensor.to

    def noted(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copies.extend([options["non_blocking"]] if "non_blocking" in options else [])
        return to(tensor, *args, **options)

    for pinned in (True, False):
        with (
            mock.patch.object(torch.Tensor, "is_pinned", lambda tensor, pinned=pinned: pinned),
            mock.patch.object(torch.Tensor, "to", noted),
        ):
            (batch,) = convmesh.loader(list(IMAGES), mesh, batch_size=7, dims={"h": 2})
        assert copies.pop() is pinned
        assert np.array_equal(batch.full_tensor(), IMAGES)


def test_pinned_memory(pool: Pool) -> None:
    pool.run(check_pinned, names=NAMES)


def check_views(mesh: DeviceMesh) -> None:
    """What numpy has and torch has not: negative strides, another machine's byte order, memory that is read-only."""
    swapped = IMAGES.astype(">f8")
    frozen = IMAGES.copy()
    frozen.flags.writeable = False
    for array in (np.flip(IMAGES, 2), IMAGES[::-1, :, ::-2], swapped, np.flip(swapped), frozen,
                  IMAGES.astype("<f4"), IMAGES.astype(">i4"), np.broadcast_to(IMAGES[:1], IMAGES.shape)):  # fmt: skip
        native = array.astype(array.dtype.newbyteorder("="))
        whole = convmesh.shard(array, mesh, data=0, h=2)
        part = convmesh.from_region(array[convmesh.region(array.shape, mesh, h=2)], array.shape, mesh, h=2)
        (loaded,) = convmesh.loader(list(array), mesh, batch_size=len(array), dims={"data": 0, "h": 2})
        for found in (whole, part, loaded):
            assert np.array_equal(found.full_tensor(), native)
            assert found.dtype == torch.from_numpy(native).dtype
            found.to_local().add_(1)
    assert np.array_equal(frozen, IMAGES)


def test_negative_strides_and_foreign_byte_orders(pool: Pool) -> None:
    pool.run(check_views, names=NAMES)


class Noisy:
    """Random crops and flips, as views, by three generators; the seed of others."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Any, float, int]:
        top = int(torch.randint(3, ()))
        image = IMAGES[index][:, top : top + 4]
        image = np.flip(image, 2) if np.random.rand() < 0.5 else image
        return image, random.random(), torch.initial_seed()


def check_augmented(mesh: DeviceMesh, workers: int) -> list[Any]:
    let_have_children()
    torch.manual_seed(100 + dist.get_rank())
    np.random.seed(100 + dist.get_rank())
    random.seed(100 + dist.get_rank())
    own = [torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()]
    dims = {"data": 0, "h": 2}, None, None
    batches = convmesh.loader(Noisy(), mesh, batch_size=3, dims=dims, seed=7, shuffle=True, num_workers=workers)
    seen = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        seen.append(full(list(batches)))
    assert torch.equal(own[0], torch.get_rng_state())
    assert own[1:] == [np.random.get_state()[1].tolist(), random.getstate()]
    return seen


def test_random_numbers_of_a_sample_are_those_of_one_process(pool: Pool) -> None:
    expected = same_on_all_ranks(pool.run(check_augmented, 0, mesh=(1, 1), names=NAMES))
    for mesh, workers in (((2, 2), 0), ((1, 2), 1)):
        actual = same_on_all_ranks(pool.run(check_augmented, workers, mesh=mesh, names=NAMES))
        assert same_on_all_ranks([actual, expected])
    first, second = ({float(x) for batch in epoch for x in batch[1]} for epoch in expected)
    assert len(first) == 6
    assert not first & second


class Unseeded:
    """Crops by a generator of its own, as MONAI's transforms have one; or of a file, of which nobody reads all."""

    def __init__(self, seed: int, path: Path | None = None):
        self.generator, self.images = np.random.default_rng(seed), np.load(path, mmap_mode="r") if path else IMAGES

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Any, str]:
        top = int(self.generator.integers(3))
        return self.images[index][:, top : top + 4], f"{index}"


def check_unseeded(mesh: DeviceMesh, path: Path) -> None:
    """Ranks that read parts of one sample draw one crop, or are told so; others draw what they like."""
    dims = {"data": 0, "h": 2}, None
    rank, column = dist.get_rank(), mesh.get_local_rank("data")
    told = pytest.raises(convmesh.ShardingError, match=r"different values where they should be equal")
    with convmesh.enable(check=True), told as caught:  # else only the first calls of a process compare
        list(convmesh.loader(Unseeded(rank), mesh, batch_size=3, dims=dims))
    assert "torch.initial_seed()" in str(caught.value)
    assert len(list(convmesh.loader(Unseeded(column), mesh, batch_size=3, dims=dims))) == 2
    assert len(list(convmesh.loader(Unseeded(column, path), mesh, batch_size=3, dims=dims))) == 2


def test_random_numbers_that_ranks_do_not_share(pool: Pool, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", IMAGES)
    pool.run(check_unseeded, tmp_path / "images.npy", names=NAMES)


def check_state(mesh: DeviceMesh, saved: list[dict[str, Any]], workers: int) -> Any:
    """All of two epochs; or the rest after each of the states."""
    let_have_children()

    def fresh(**options: Any) -> Any:
        wanted = {"batch_size": 2, "dims": {"data": 0}, "shuffle": True, "seed": 3, "num_workers": workers, **options}
        return convmesh.loader(list(range(7)), mesh, **wanted)

    def rest(batches: Any) -> list[Any]:
        seen = []
        for epoch in range(batches.epoch, 2):
            batches.set_epoch(epoch)
            for batch in batches:
                seen.append((batch.full_tensor().tolist(), batches.state_dict()))
        return [*seen, batches.state_dict()]

    if not saved:
        return rest(fresh())
    results = []
    for state in saved:
        batches = fresh()
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        results.append(rest(batches))
    if workers:
        return results
    again = fresh()
    again.load_state_dict(saved[1])
    again.set_epoch(1)  # another epoch begins at its beginning
    assert len(list(again)) == len(list(again)) == 4
    with pytest.raises(convmesh.CheckpointError, match=r"'batch_size': 2.*'batch_size': 3"):
        fresh(batch_size=3).load_state_dict(saved[0])
    return results


def test_a_loader_goes_on_where_it_stopped(pool: Pool) -> None:
    *seen, end = same_on_all_ranks(pool.run(check_state, [], 0, names=NAMES))
    states = [state for _, state in seen]
    assert (states[0]["epoch"], states[0]["batches"], end["epoch"], end["batches"]) == (0, 1, 2, 0)
    for given, workers in ((states, 0), (states[5:6], 1)):
        found = pool.run(check_state, given, workers, mesh=(2, 1), names=NAMES)[0]
        for state, rest in zip(given, found, strict=True):
            assert rest == [*seen[states.index(state) + 1 :], end]


def check_one_order(mesh: DeviceMesh) -> None:
    """Where nobody counts epochs all passes are alike, and so is the one after a restart."""
    first, second = (
        convmesh.loader(list(range(7)), mesh, batch_size=2, dims={"data": 0}, shuffle=True) for _ in range(2)
    )
    seen = [[batch.full_tensor().tolist() for batch in first] for _ in range(2)]
    second.load_state_dict(first.state_dict())
    assert seen == [[batch.full_tensor().tolist() for batch in second]] * 2


def test_passes_that_nobody_counts(pool: Pool) -> None:
    pool.run(check_one_order, names=NAMES)


def check_checkpoint(mesh: DeviceMesh, folder: Path) -> None:
    model = convmesh.distribute(torch.nn.Linear(1, 1), mesh)
    batches = convmesh.loader(torch.arange(8), mesh, batch_size=2, dims={"data": 0})
    for step, _ in zip(range(3), batches, strict=False):
        convmesh.save_checkpoint(folder, model, step=step, data=batches)
    other = convmesh.loader(torch.arange(8), mesh, batch_size=2, dims={"data": 0})
    convmesh.load_checkpoint(folder, model, data=other)
    assert [batch.full_tensor().tolist() for batch in other] == [[6, 7]]


def test_it_is_part_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_checkpoint, tmp_path, names=NAMES)


class Files:
    """One volume in the formats of others; opened in the process that reads it."""

    def __init__(self, folder: Path, kind: str):
        self.folder, self.kind = folder, kind

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        path = self.folder / f"{index}.{self.kind}"
        if self.kind == "zarr":
            import zarr

            return zarr.open_array(path, mode="r")
        if self.kind == "h5":
            import h5py

            return h5py.File(path, "r")["volume"]
        import nibabel

        return nibabel.load(path, mmap=True).dataobj


def check_files(mesh: DeviceMesh, folder: Path, kind: str, volumes: np.ndarray) -> None:
    files = Files(folder, kind)
    one = convmesh.shard(files[0], mesh, data=0, h=1)
    assert np.array_equal(one.full_tensor(), volumes[0])
    (batch,) = convmesh.loader(files, mesh, batch_size=2, dims={"data": 0, "h": 2})
    assert np.array_equal(batch.full_tensor(), volumes)
    (slices,) = convmesh.loader(files[0], mesh, batch_size=5, dims={"data": 0, "h": 1})  # a file of all samples
    assert np.array_equal(slices.full_tensor(), volumes[0])


@pytest.mark.slow  # `make compat` has no other people's packages
@pytest.mark.parametrize("kind", ["zarr", "h5", "nii"])
def test_files_of_other_formats(pool: Pool, tmp_path: Path, kind: str) -> None:
    volumes = np.random.default_rng(0).integers(-9, 9, size=(2, 5, 7, 4)).astype(np.int32)
    for index, volume in enumerate(volumes):
        path = tmp_path / f"{index}.{kind}"
        if kind == "zarr":
            import zarr

            zarr.create_array(path, shape=volume.shape, chunks=(2, 3, 4), dtype=volume.dtype)[:] = volume
        elif kind == "h5":
            import h5py

            with h5py.File(path, "w") as file:
                file.create_dataset("volume", data=volume, chunks=(2, 3, 4), compression="gzip")
        else:
            import nibabel

            nibabel.Nifti1Image(volume, np.eye(4)).to_filename(path)
    pool.run(check_files, tmp_path, kind, volumes, names=NAMES)
