"""Folders that ranks do not share, saves on one rank only, and what interrupted saves leave behind."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.training.checkpoint import files, shards
from tests.launch import launch
from tests.training.test_checkpoint import Training
from tests.training.test_checkpoint_ranks import GROUP_SECONDS, check, fails


def save_in_folders_of_their_own(mesh: DeviceMesh, place: Path) -> None:
    """As on hosts that share no disk: one name, and different folders."""
    mine = place / str(dist.get_rank())
    mine.mkdir()
    os.chdir(mine)
    training = Training(mesh)
    fails(lambda: training.save(Path("runs"), 1), "does not see the folder runs/.unfinished-1-",
          "remedy: a folder that is shared between all hosts")  # fmt: skip
    assert convmesh.latest_checkpoint("runs") is None
    # A rank that made the folder itself would write what the first one does not see.
    made = Path.is_dir
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: path.mkdir(parents=True) is None if dist.get_rank() else made(path))
        patch.setattr(shards, "_SHARED_BYTES", 1)
        fails(lambda: training.save(Path("runs"), 2), "rank-00001.safetensors was written on ", "does not see it")
    assert convmesh.latest_checkpoint("runs") is None
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    torch.manual_seed(dist.get_rank())
    convmesh.save_checkpoint("runs", nn.Linear(1, 1), step=3, process_group=alone)
    dist.barrier()
    fails(lambda: convmesh.load_checkpoint("runs", nn.Linear(1, 1)), "on rank 1: ", "is another one on ")


def test_folders_that_are_not_shared_are_noticed(tmp_path: Path) -> None:
    check(launch(save_in_folders_of_their_own, tmp_path, mesh=(1, 2)))


def save_on_one_rank(mesh: DeviceMesh, place: Path, before: bool) -> None:
    model = convmesh.distribute(nn.Conv2d(1, 1, 1), mesh)
    if before:
        with pytest.MonkeyPatch.context() as patch:
            write = files.write
            patch.setattr(files, "write", lambda *args: (time.sleep(GROUP_SECONDS + 1), write(*args))[1])
            convmesh.save_checkpoint(place, model, step=0)  # ranks that have come may take longer than others
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        fails(lambda: convmesh.save_checkpoint(place, model, step=1), "saving step 1 in ",
              "remedy: call it on all ranks (0, 1), not on one")  # fmt: skip
        store.set("said", "")
    else:
        store.get("said")


@pytest.mark.parametrize("before", [True, False])
def test_a_save_on_one_rank_only_says_so(tmp_path: Path, before: bool) -> None:
    check(launch(save_on_one_rank, tmp_path, before, mesh=(1, 2), group_seconds=GROUP_SECONDS))


def test_only_what_was_left_long_ago_is_cleared_away(tmp_path: Path) -> None:
    old, new = tmp_path / ".unfinished-1-old", tmp_path / ".unfinished-1-new"
    for left in (old, new):
        left.mkdir()
        (left / "rank-00000.safetensors").write_bytes(b"")
    for path in (old, *old.iterdir()):
        os.utime(path, (0, 0))
    convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, "step-000000002"]
