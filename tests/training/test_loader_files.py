"""Samples in files of other packages: zarr, HDF5 and NIfTI, of which ranks read their slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.harness import Pool
from tests.training.test_loader import NAMES


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
