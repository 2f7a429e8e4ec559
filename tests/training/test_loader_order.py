"""Where a loader stopped, and goes on; random numbers that ranks which read one sample share."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.compare import same_on_all_ranks
from tests.harness import Pool
from tests.training.test_loader import IMAGES, NAMES, full, let_have_children


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
