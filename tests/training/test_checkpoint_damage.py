"""Checkpoints that are damaged, forged or of another kind: noticed on all ranks, and nothing in them runs."""

from __future__ import annotations

import json
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import convmesh
from convmesh.training.checkpoint import shards
from convmesh.training.checkpoint.values import decode, encode
from tests.harness import Pool
from tests.training.test_checkpoint_files import Hostile, bits


class Training:
    """A model, an optimizer with state, a scheduler and the random state, and whether anything in them has changed."""

    def __init__(self, mesh: DeviceMesh | None = None, seed: int = 0):
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Linear(3, 4).double()
        if mesh is not None:
            self.model = convmesh.distribute(self.model, mesh)
            weight = self.model.weight.redistribute(mesh, [Shard(0)] * mesh.ndim)
            self.model.weight = nn.Parameter(weight.detach())
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [1, 2])
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.scheduler.step()
        self.objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def state(self) -> str:
        tensors: dict[str, torch.Tensor] = {}
        tree = [encode(it.state_dict(), name, tensors) for name, it in self.objects.items()]
        tensors["random"] = torch.get_rng_state()
        return json.dumps([tree, {name: bits(shards.local_of(tensor)).hex() for name, tensor in tensors.items()}])

    def refuses(self, folder: Path, named: str) -> None:
        """Loading fails, names a file or says something else, and nothing has changed."""
        before = self.state()
        with pytest.raises(convmesh.CheckpointError) as caught:
            convmesh.load_checkpoint(folder, **self.objects)
        assert named in str(caught.value), (named, str(caught.value))
        assert self.state() == before


def alone(mesh: DeviceMesh, work: Callable[[], Any]) -> None:
    """On the first rank, while the others wait."""
    if mesh.get_rank() == 0:
        work()
    dist.barrier(mesh.get_group())


def damage(good: Path, other: Path, path: Path, mark: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What can be wrong with a checkpoint, each time with a good one to begin with: the file to be named, and how."""
    choice = random.Random(0)
    for name in sorted(file.name for file in good.iterdir()):
        content = (good / name).read_bytes()
        for place in (0, 9, len(content) - 1, *(choice.randrange(len(content)) for _ in range(4))):
            flipped = bytearray(content)
            flipped[place] ^= 1 << choice.randrange(8)
            yield name, partial((path / name).write_bytes, flipped)
        for wrong in (b"", content[:-1], content[: len(content) // 2], content + b" ", pickle.dumps(Hostile(mark))):
            yield name, partial((path / name).write_bytes, wrong)
        yield name, (path / name).unlink
    for name in (".metadata", "__0_0.distcp", "rank-00009.safetensors", "manifest.pkl"):
        yield name, partial((path / name).write_bytes, pickle.dumps(Hostile(mark)))
    yield "rank-00001.safetensors", partial(shutil.copy, other / "rank-00001.safetensors", path)


def meet_damage(mesh: DeviceMesh, folder: Path) -> int:
    saved, training, mark = Training(mesh), Training(mesh, seed=1), folder / "hostile code has run"
    path = convmesh.save_checkpoint(folder, **saved.objects, step=1)
    other = convmesh.save_checkpoint(folder / "other", **Training(mesh, seed=2).objects, step=1)
    good, count = folder / "good", 0
    alone(mesh, lambda: shutil.copytree(path, good))
    for name, spoil in damage(good, other, path, mark):
        alone(mesh, spoil)
        training.refuses(folder, name)
        alone(mesh, lambda: (shutil.rmtree(path), shutil.copytree(good, path)))
        count += 1
    convmesh.load_checkpoint(folder, **training.objects)
    assert training.state() == saved.state()
    assert not mark.exists()
    return count


def test_damage_is_noticed_on_all_ranks_before_anything_changes(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(meet_damage, tmp_path, mesh=(2,)) == [3 * 13 + 5] * 2


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest that says something else, with the right checksum."""
    said = json.loads((path / "manifest.json").read_bytes())
    change(said)
    rest = json.dumps({key: value for key, value in said.items() if key not in ("format", "crc32")})[1:].encode()
    head = f'{{"format": "{said["format"]}", "crc32": "{zlib.crc32(rest):08x}",\n'
    (path / "manifest.json").write_bytes(head.encode() + rest)


def test_a_forged_manifest_cannot_do_anything(tmp_path: Path) -> None:
    training = Training()
    path = convmesh.save_checkpoint(tmp_path / "a", **training.objects, step=1)
    secret = tmp_path / "rank-00000.safetensors"
    shutil.copy(path / secret.name, secret)
    forgeries: list[Callable[[dict[str, Any]], Any]] = [
        lambda said: said["tree"].update(values={"python/object/apply": ["os.system", "true"]}),
        lambda said: said["files"].update({f"../{secret.name}": said["files"][secret.name]}),
        lambda said: said["tensors"]["model/weight"].update(dtype="save"),
        lambda said: said["tensors"]["model/weight"].update(shape=[2**40, 2**40]),
        lambda said: said["tensors"]["model/weight"]["chunks"][0].__setitem__(1, 2**40),
        lambda said: said["tensors"]["model/weight"]["chunks"][0].__setitem__(3, []),
        lambda said: said["tree"].pop("step"),
        lambda said: said.update(block=0),
    ]
    good = (path / "manifest.json").read_bytes()
    for forgery in forgeries:
        forged(path, forgery)
        training.refuses(tmp_path / "a", "a")
        (path / "manifest.json").write_bytes(good)
    forged(path, lambda said: None)
    convmesh.load_checkpoint(tmp_path / "a", **training.objects)


def test_an_old_checkpoint_is_said_to_be_one(tmp_path: Path) -> None:
    mark, old = tmp_path / "hostile code has run", tmp_path / "step-000000001"
    old.mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (old / name).write_bytes(pickle.dumps(Hostile(mark)))
    Training().refuses(tmp_path, "is of an old format, that of convmesh 0.1.0")
    assert not mark.exists()


def test_a_value_that_was_made_up_is_no_value() -> None:
    assert decode(encode((1, {2: 3.0}), "x", {}), {}) == (1, {2: 3.0})
    with pytest.raises(KeyError):
        decode({"eval": "1"}, {})


def refuse_partial(mesh: DeviceMesh, folder: Path) -> None:
    pending = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(convmesh.CheckpointError, match=r"sums/0 is a Partial"):
        convmesh.save_checkpoint(folder, convmesh.distribute(nn.Linear(1, 1), mesh), step=0, sums=[pending])


def test_pending_sums_are_not_saved(pool: Pool, tmp_path: Path) -> None:
    pool.run(refuse_partial, tmp_path, mesh=(2,))
    assert not any(tmp_path.iterdir())
