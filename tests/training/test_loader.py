"""Batches of dicts and tuples, of any shapes; fields that do not fit; ranks outside of the mesh; pinned memory."""

from __future__ import annotations

import multiprocessing as mp
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import convmesh
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
