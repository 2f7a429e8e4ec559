"""What is in the files of a checkpoint: any kind of value, in any layout; nothing that runs; nothing unnoticed."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import convmesh
from convmesh.training.checkpoint import files, shards
from convmesh.training.checkpoint.manifest import read_manifest
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
