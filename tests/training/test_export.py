"""A distributed model as plain tensors, in memory and in a file, and plain state that is loaded into one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.training.small_net import NAMES, Net, build, data, loss_of


def train(model: nn.Module, mesh: DeviceMesh | None, dims: dict[str, int]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, mesh, dims, step).backward()
        optimizer.step()
    return optimizer


def one_process() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(None)
    return model, train(model, None, {})


def assert_same_state(actual: Any, expected: Any) -> None:
    """Trees of plain tensors, the same up to rounding; other values exactly."""
    assert type(actual) is type(expected) or isinstance(actual, dict)
    if isinstance(expected, torch.Tensor):
        assert type(actual) is torch.Tensor
        assert not actual.requires_grad
        assert_close(actual, expected, scale=1.0)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        for key in expected:
            assert_same_state(actual[key], expected[key])
    elif isinstance(expected, tuple):
        for mine, its in zip(actual, expected, strict=True):
            assert_same_state(mine, its)
    else:
        assert actual == expected


def with_fsdp(mesh: DeviceMesh) -> nn.Module:
    """Sharded over "data", with rows that do not divide, replicated over "h"; buffers are on the mesh of "h"."""
    model = build(mesh["h"])
    return fully_shard(model, mesh=mesh["data"])


def check_full_state(mesh: DeviceMesh, fsdp: bool) -> None:
    expected, wanted = one_process()
    model = with_fsdp(mesh) if fsdp else build(mesh)
    optimizer = train(model, mesh["h"] if fsdp else mesh, {"h": 2})
    kinds = {type(p) for tensor in model.state_dict().values() for p in tensor.placements}
    assert kinds == ({Shard, Replicate} if fsdp else {Replicate})
    found = convmesh.full_state_dict(model, optimizer, all_ranks=True)
    assert_same_state(found, (dict(expected.state_dict()), wanted.state_dict()))
    assert found[0]["left.weight"] is found[0]["right.weight"]
    if not fsdp:  # nothing is copied
        assert found[0]["stem.weight"].data_ptr() == model.stem.weight.to_local().data_ptr()
    first = dist.get_rank() == mesh.mesh.min()
    alone = convmesh.full_state_dict(model, optimizer, cpu=False)
    assert [bool(state) for state in alone] == [first, first]
    compiled = torch.compile(model, backend="eager")
    assert list(convmesh.full_state_dict(compiled)) == (list(found[0]) if first else [])
    other = Net().double()
    other.load_state_dict(found[0])
    torch.optim.AdamW(other.parameters()).load_state_dict(found[1])


@pytest.mark.parametrize("fsdp", [False, True])
def test_the_state_of_one_process(pool: Pool, fsdp: bool) -> None:
    pool.run(check_full_state, fsdp, names=NAMES[:2])


def test_ranks_of_a_part_of_the_world(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_full_state, False, mesh=(1, 2), names=NAMES[:2], ranks=(1, 3))
    pool.run(check_export, tmp_path / "model.safetensors", False, mesh=(1, 2), names=NAMES[:2], ranks=(1, 3))


def check_export(mesh: DeviceMesh, path: Path, fsdp: bool) -> None:
    model = with_fsdp(mesh) if fsdp else build(mesh)
    model.register_buffer("cache", torch.ones(3), persistent=False)
    assert convmesh.export(model, path) == path
    assert convmesh.export(model, path) == path  # in place of the first
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    other = Net().double()
    other.load_state_dict(load_file(path))
    for mine, wanted in zip(other.state_dict().values(), build(None).state_dict().values(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("fsdp", [False, True])
def test_a_file_that_loads_without_convmesh(pool: Pool, tmp_path: Path, fsdp: bool) -> None:
    pool.run(check_export, tmp_path / "new" / "model.safetensors", fsdp, names=NAMES[:2])


class Odd(nn.Module):
    def __init__(self, value: Any):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def check_refusals(mesh: DeviceMesh, folder: Path) -> None:
    model = convmesh.distribute(Odd("text"), mesh)
    wide = convmesh.distribute(nn.ParameterList([torch.ones(2, dtype=torch.complex128)]), mesh)
    for wrong, words in (
        (model, "_extra_state is a str, and safetensors has tensors only"),
        (wide, "dtype torch.complex128"),
    ):
        with pytest.raises(convmesh.CheckpointError, match=words):
            convmesh.export(wrong, folder / "a.safetensors")
    with pytest.raises(convmesh.CheckpointError, match=r"is a folder\n  remedy: a file in it"):
        convmesh.export(fully_shard(Net().double(), mesh=mesh), folder)
    (folder / "file").write_text("")
    with pytest.raises(convmesh.CheckpointError, match="remedy: another folder"):
        convmesh.export(fully_shard(Net().double(), mesh=mesh), folder / "file" / "a.safetensors")
    state = convmesh.full_state_dict(model, all_ranks=True)
    assert state["_extra_state"] == "text"
    with pytest.raises(convmesh.ShardingError, match=r"remedy: .*convmesh.export\(model, path\)"):
        save_file({"weight": model.weight.detach()}, folder / "b.safetensors")
    with pytest.warns(
        UserWarning, match=r"(?s)torch.save of a DTensor writes this rank's local tensor.*convmesh.export"
    ):
        torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")


def test_what_is_refused_says_what_to_do(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_refusals, tmp_path, mesh=(2,), names=("h",))


def check_loading(mesh: DeviceMesh, fsdp: bool) -> None:
    """From a file that all have, that the first rank has, or that others have in another version."""
    expected = Net().double()
    with torch.no_grad():
        for tensor in expected.parameters():
            tensor.normal_()
    wanted = dict(expected.state_dict())
    other = {name: value * 0 for name, value in wanted.items()} | {"besides": torch.ones(2)}
    first = dist.get_rank() == 0
    for given in (wanted, wanted if first else {}, wanted if first else other):
        model = with_fsdp(mesh) if fsdp else build(mesh)
        model.load_state_dict(given)
        found = convmesh.full_state_dict(model, all_ranks=True)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert model.left.weight is model.right.weight
    model.load_state_dict(model.state_dict())
    model.load_state_dict({name: value.float() for name, value in wanted.items()} if first else {})
    assert model.head.weight.dtype == torch.float64
    shapes = wanted | {"head.weight": torch.ones(7)}
    for wrong, words in ((shapes, "size mismatch for head.weight"), (wanted | {"x": torch.ones(1)}, "Unexpected key")):
        with pytest.raises(RuntimeError, match=words):
            model.load_state_dict(wrong if first else {})
    missing = {name: value for name, value in wanted.items() if name != "head.bias"}
    result = model.load_state_dict(missing if first else wanted, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], [])
    part = {name: wanted[f"head.{name}"] + 1 for name in ("weight", "bias")}  # of a submodule, as of a backbone
    model.head.load_state_dict(part if first else {})
    found = convmesh.full_state_dict(model, all_ranks=True)
    assert all(torch.equal(found[f"head.{name}"], value) for name, value in part.items())


@pytest.mark.parametrize("fsdp", [False, True])
def test_plain_state_is_loaded_from_a_file_that_one_rank_has(pool: Pool, fsdp: bool) -> None:
    pool.run(check_loading, fsdp, names=NAMES[:2])


def check_optimizer(mesh: DeviceMesh) -> None:
    """One process's training goes on on a mesh."""
    expected, wanted = one_process()
    model = build(mesh, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model.load_state_dict(expected.state_dict())
    optimizer.load_state_dict(copy.deepcopy(wanted.state_dict()))  # torch's own shares tensors
    for net, adam, where in ((expected.eval(), wanted, None), (model.eval(), optimizer, mesh)):
        for step in (2, 3):
            adam.zero_grad()
            loss_of(net, where, {"data": 0, "h": 2}, step).backward()
            adam.step()
    for mine, its in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(mine.to_local(), its)
    assert isinstance(optimizer.state[model.head.weight]["exp_avg"], DTensor)


def test_plain_optimizer_state(pool: Pool) -> None:
    pool.run(check_optimizer, names=NAMES[:2])


def check_replicate(mesh: DeviceMesh) -> None:
    model, expected = build(mesh).eval(), build(None).eval()
    x, _ = data()
    sharded = distribute_tensor(x, mesh, [Shard(0), Replicate()])
    found = convmesh.replicate({"x": x, "rest": [sharded, 3, "name"]}, mesh)
    assert found["rest"][0] is sharded
    assert found["rest"][1:] == [3, "name"]
    with torch.inference_mode():
        result = model(found["x"])
        assert result.placements == (Replicate(), Replicate())
        assert_close(result.to_local(), expected(x))
    with convmesh.enable(check=True), pytest.raises(convmesh.ShardingError, match="different values"):
        convmesh.replicate(x + dist.get_rank(), mesh)
    with pytest.raises(convmesh.ShardingError, match=r"plain torch.Tensor(?s:.*)convmesh.replicate\(tensor, mesh\)"):
        model(x)


def test_a_plain_input_is_replicated(pool: Pool) -> None:
    pool.run(check_replicate, names=NAMES[:2])


def check_pretrained(mesh: DeviceMesh, folder: Path) -> None:
    """Of Hugging Face: the first rank's file counts, whatever others have; and back in their format, in two ways."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    torch.manual_seed(5 + dist.get_rank())
    mine = ResNetForImageClassification(config)
    if dist.get_rank() == 0:
        mine.save_pretrained(folder)
        mine = ResNetForImageClassification.from_pretrained(folder)
    model = convmesh.distribute(mine, mesh)
    convmesh.export(model, folder / "again" / "model.safetensors")
    config.save_pretrained(folder / "again")
    state = convmesh.full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "saved", state_dict=state)
    dist.barrier(mesh.get_group())
    expected = ResNetForImageClassification.from_pretrained(folder).eval()
    for path in (folder / "again", folder / "saved"):
        again = ResNetForImageClassification.from_pretrained(path)
        for a, b in zip(expected.state_dict().values(), again.state_dict().values(), strict=True):
            assert torch.equal(a, b)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    scores = model.eval()(convmesh.shard(x, mesh, h=2)).logits
    assert_close(scores.full_tensor(), expected(x).logits)


@pytest.mark.slow  # `make compat` has no other people's packages
def test_pretrained_weights_before_distribute(pool: Pool, tmp_path: Path) -> None:
    pool.run(check_pretrained, tmp_path, mesh=(2,), names=("h",))
