"""What is in the files of a checkpoint: any kind of value, in any layout; nothing that runs; nothing unnoticed."""

from __future__ import annotations

import json
import math
import pickle
import random
import shutil
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import convmesh
from convmesh.training.checkpoint import files, shards
from convmesh.training.checkpoint.manifest import read_manifest
from convmesh.training.checkpoint.values import decode, encode
from tests.harness import Pool

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.bool, torch.uint8, torch.int64, torch.uint16,
]  # fmt: skip
SHAPES = [(), (1,), (5,), (0, 3), (7, 5), (3, 8, 2), (1, 1, 9), (2, 3, 4, 5)]


def test_plain_values_come_back_as_they_were(tmp_path: Path) -> None:
    values = {
        "numbers": [0, -1, 10**30, True, False, None, 0.1, -0.0, 1e-310, 5e-324, math.inf, -math.inf, 1 + 2j],
        "words": ["", '\N{SNOWMAN}\n"', b"\x00\xff", "\ud800"],
        "nested": ((), (1, (2.5, [3])), {1: "one", (2, 3): {"x": {4}}, None: frozenset({5}), 0.5: {}}),
        "kinds": [OrderedDict([("b", 1), ("a", 2)]), Counter({3: 2}), torch.Size([2, 3]), torch.float32],
        "a tag": {"tensor": "no tensor", "tuple": [1]},
    }
    convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), step=1, values=values, not_a_number=math.nan, nothing=None)
    found = convmesh.load_checkpoint(tmp_path, nn.Linear(1, 1)).extra
    assert found["values"] == values
    assert repr(found["values"]) == repr(values)  # types, signs of zero and the order of keys as well
    assert math.isnan(found["not_a_number"])
    assert found["nothing"] is None
    with pytest.raises(convmesh.CheckpointError, match=r"bad/0/x is a .*test_checkpoint_files.Hostile, which is not"):
        convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), step=2, bad=[{"x": Hostile(tmp_path)}])
    with pytest.raises(convmesh.CheckpointError, match=r"is a Tensor of layout torch.sparse_coo"):
        convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), step=2, bad=torch.eye(2).to_sparse())


def made(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits, among them those of numbers that are none."""
    generator = torch.Generator().manual_seed(len(shape))
    if dtype == torch.bool:
        return torch.randint(2, shape, dtype=torch.uint8, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(files.bytes_of(tensor)) if tensor.numel() else b""


def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = {(dtype, shape): made(dtype, shape) for dtype in DTYPES for shape in SHAPES}
    tensors[torch.float32, (2, 3, 4, 5)] = tensors[torch.float32, (2, 3, 4, 5)].permute(3, 1, 0, 2)
    convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), step=1, tensors=tensors)
    found = convmesh.load_checkpoint(tmp_path, nn.Linear(1, 1)).extra["tensors"]
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (found[key].dtype, found[key].shape, bits(found[key])) == (tensor.dtype, tensor.shape, bits(tensor))


class Buffers(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        for number, tensor in enumerate(tensors):
            self.register_buffer(f"b{number}", tensor)


@contextmanager
def small_blocks() -> Iterator[list[int]]:
    """So that tensors of a few numbers have many blocks, and are read in many goes, the sizes of which are listed."""
    sizes: list[int] = []
    read_bytes = files.read_bytes

    def listed(path: Path, begin: int, size: int) -> bytearray:
        if path.suffix == ".safetensors" and begin:
            sizes.append(size)
        return read_bytes(path, begin, size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", 64)
        patch.setattr(files, "_READ_BYTES", 100)
        patch.setattr(shards, "_SHARED_BYTES", 32)
        patch.setattr(files, "read_bytes", listed)
        yield sizes


def numbers() -> list[torch.Tensor]:
    kinds = [torch.float64, torch.bfloat16, torch.int64, torch.bool]
    return [made(kinds[number % 4], shape) for number, shape in enumerate([*SHAPES, (33, 6), (5, 40)])]


def layouts(mesh: DeviceMesh, seed: int) -> list[DTensor]:
    """Every shape, in placements that depend on the seed: some parts are uneven, some empty."""
    choice = random.Random(seed)
    result = []
    for tensor in numbers():
        kinds: list[Placement] = [Replicate(), *map(Shard, range(tensor.ndim))]
        result.append(distribute_tensor(tensor, mesh, [choice.choice(kinds) for _ in range(mesh.ndim)]))
    return result


def reshard(mesh: DeviceMesh, folder: Path) -> None:
    flat = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("flat",))
    with small_blocks() as sizes:
        for seed in range(4):
            model = Buffers(list(layouts(mesh, seed)))
            path = convmesh.save_checkpoint(folder, model, step=seed, also={"a": [next(model.buffers())]})
            said, _ = read_manifest(path)
            assert len(said.files) > 1
            # Every byte is written once, whoever has it.
            assert sum(file.size - file.header_size for file in said.files.values()) == sum(
                math.prod(saved.shape) * saved.dtype.itemsize for saved in said.tensors.values()
            )
            for target, other in ((flat, seed + 100), (mesh, seed + 200)):
                expected = layouts(target, other)
                fresh = Buffers([torch.zeros_like(tensor) for tensor in expected])
                found = convmesh.load_checkpoint(folder, fresh, step=seed)
                for own, tensor in zip(fresh.buffers(), expected, strict=True):
                    assert isinstance(own, DTensor)
                    assert own.placements == tensor.placements
                    assert bits(own.to_local()) == bits(tensor.to_local())
                # There is no mesh to put a value on.
                assert bits(found.extra["also"]["a"][0]) == bits(expected[0].full_tensor())
        assert max(sizes) < 100 + 2 * 64


def test_tensors_in_any_layout_load_in_any_other(pool: Pool, tmp_path: Path) -> None:
    pool.run(reshard, tmp_path, names=("h", "w"))
    for seed in range(4):
        fresh = Buffers([torch.zeros_like(tensor) for tensor in numbers()])
        convmesh.load_checkpoint(tmp_path, fresh, step=seed)
        assert all(bits(own) == bits(tensor) for own, tensor in zip(fresh.buffers(), numbers(), strict=True))


def read_a_part(mesh: DeviceMesh, folder: Path) -> tuple[int, int]:
    """Bytes of a tensor of 4096 that a rank reads: when it needs the rows that it has written, and some of all rows."""
    counts = []
    with small_blocks() as sizes:
        one = Buffers([distribute_tensor(torch.randn(64, 8, dtype=torch.float64), mesh, [Shard(0)])])
        convmesh.save_checkpoint(folder, one, step=9)
        for placement in (Shard(0), Shard(1)):
            sizes.clear()
            fresh = Buffers([distribute_tensor(torch.zeros(64, 8, dtype=torch.float64), mesh, [placement])])
            convmesh.load_checkpoint(folder, fresh, random_state=False)
            assert torch.equal(fresh.b0.full_tensor(), one.b0.full_tensor())
            counts.append(sum(sizes))
    return counts[0], counts[1]


def test_ranks_read_what_they_need(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(read_a_part, tmp_path, mesh=(4,)) == [(1024, 4096)] * 4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_others_can_read_the_files(tmp_path: Path) -> None:
    """They are safetensors, and the words for parts are those of torch.distributed.checkpoint."""
    model = nn.Conv2d(2, 3, 3)
    path = convmesh.save_checkpoint(tmp_path, model, step=1)
    state = {f"model/{name}": torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(torch.equal(state[f"model/{name}"], tensor) for name, tensor in model.state_dict().items())


class Hostile:
    """Whoever unpickles this makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


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
