"""`convmesh.simulate`: what each rank has for itself, what ranks share, and what is left behind."""

from __future__ import annotations

import ast
import gc
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import convmesh
from convmesh.simulation import process_state
from tests.compare import same_on_all_ranks
from tests.launch import launch


def test_each_rank_has_its_own_random_numbers() -> None:
    """As processes have: a seed of one does not disturb the others, whoever draws when."""
    torch.manual_seed(7)
    random.seed(7)
    first = torch.rand(3), random.random()
    torch.manual_seed(7)
    random.seed(7)

    def draw(mesh: DeviceMesh) -> list[Any]:
        rank = dist.get_rank()
        begin = [torch.rand(3), random.random()]
        torch.manual_seed(rank)
        numpy.random.seed(rank)
        found = [torch.rand(2)]
        for _ in range(rank):
            torch.rand(1)
        dist.barrier()
        found += [F.dropout(torch.ones(50)), torch.tensor(numpy.random.rand(2)), torch.randperm(9)]
        return [*begin, *found]

    def alone(rank: int) -> list[torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(rank)
            found = [torch.rand(2)]
            for _ in range(rank):
                torch.rand(1)
            state = numpy.random.RandomState(rank)
            return [*found, F.dropout(torch.ones(50)), torch.tensor(state.rand(2)), torch.randperm(9)]

    for rank, found in enumerate(convmesh.simulate(draw, 5)):
        assert torch.equal(found[0], first[0])
        assert found[1] == first[1]
        for mine, expected in zip(found[2:], alone(rank), strict=True):
            assert torch.equal(mine, expected)
    assert torch.equal(torch.rand(3), first[0]), "the caller's own are as they were"
    assert random.random() == first[1]


def test_random_operators_on_dtensors() -> None:
    """Numbers of one device, as of real ranks."""

    def drop(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return F.dropout(x, 0.4) + torch.rand_like(x)

    x = torch.rand(4, 9, dtype=torch.float64)
    with torch.random.fork_rng():
        expected = drop(x)

    def dropped(mesh: DeviceMesh) -> torch.Tensor:
        return drop(distribute_tensor(x, mesh, [Shard(0), Shard(1)], src_data_rank=None)).full_tensor()

    with convmesh.enable():
        assert torch.equal(same_on_all_ranks(convmesh.simulate(dropped, (2, 4))), expected)


def test_what_a_process_has_once_each_rank_has() -> None:
    def change(mesh: DeviceMesh) -> tuple[int, int]:
        x = distribute_tensor(torch.rand(1, 2, 8, 6), mesh, [Shard(2)], src_data_rank=None)
        with warnings.catch_warnings(), convmesh.enable(), convmesh.count_traffic() as traffic:
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float64)
            for _ in range(1 + dist.get_rank()):
                warnings.warn("not seen", stacklevel=2)
            F.max_pool2d(x, 3, 1, 1)
            dist.barrier()
            assert torch.get_default_dtype() == torch.float64
        with pytest.raises(UserWarning, match="seen"):
            warnings.warn("seen", stacklevel=2)
        return traffic.exchanges, traffic.bytes_sent

    edge, middle = (1, 2 * 6 * 4), (1, 2 * 2 * 6 * 4)
    before = list(warnings.filters), sys.stdout
    assert convmesh.simulate(change, 4) == [edge, middle, middle, edge]
    assert before == (list(warnings.filters), sys.stdout)


def test_warnings_that_a_rank_records_are_its_own() -> None:
    def warned(mesh: DeviceMesh) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            dist.barrier()
            warnings.warn(f"of rank {dist.get_rank()}", stacklevel=2)
            dist.barrier()
        return [str(one.message) for one in seen]

    assert convmesh.simulate(warned, 3) == [["of rank 0"], ["of rank 1"], ["of rank 2"]]


def test_one_simulation_at_a_time_and_what_makes_no_mesh() -> None:
    with pytest.raises(RuntimeError, match="another simulation"):
        convmesh.simulate(lambda mesh: convmesh.simulate(lambda _: None, 2), 2)
    for mesh, names in (((), None), ((0, 2), None), ((2, 2), ("h",))):
        with pytest.raises(ValueError, match="simulate: "):
            convmesh.simulate(lambda mesh: None, mesh, names)


def beside(mesh: DeviceMesh) -> None:
    """Collectives and DTensors of the process's own group work before, after, and with rules on or off."""
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])

    def reduce(inner: DeviceMesh) -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        y = distribute_tensor(torch.arange(6.0), inner, [Shard(0), Replicate()], src_data_rank=None)
        return float(total) + float(y.sum().full_tensor())

    for _ in range(2):
        assert convmesh.simulate(reduce, (3, 2)) == [6.0 + 15.0] * 6
        assert x.sum().full_tensor() == 15.0
        assert dist.get_world_size() == 2
    with convmesh.enable():
        assert convmesh.simulate(reduce, (3, 2)) == [21.0] * 6
        assert x.flip(0).full_tensor()[0] == 5.0
    dist.barrier()


def test_beside_a_process_group() -> None:
    for outcome in launch(beside, mesh=(2,), names=("x",)):
        assert outcome.error is None, outcome.message


# State of modules that ranks share on purpose, and why that is right.
SHARED = {
    "by memory, a process group, a mesh, or an object that only one rank has":
        "arrivals._arrivals interception._known interception._started mailbox._letters mailbox._mailboxes "
        "agreement._paths partial._cached_sums implicit_replication._modules foreach._stepping ranks._groups "
        "tracing._kept drift._steps idle_optimizers._models idle_optimizers._replaced idle_optimizers._checked "
        "opened._shared groups._backends",
    "by thread": "tensor_lists._known layers._by_thread layers._handles",
    "the same for all ranks of one machine": "benchmark._fastest choice._when_forgotten rules._known shapes._known",
    "rules, which the first rank installs, and the end of the simulation removes":
        "registry.rules registry._behaviour registry.composites registry.switches installation._guards "
        "installation._replaced installation._undo installation._library registration._library "
        "view_writeback.watching_reads view_writeback._stop_watching copy_notes.anything_noted collectives._kernels "
        "collectives.interceptors",
    "not used by simulated ranks: their group compares, and compiled code is not theirs":
        "agreement._timeout agreement._undo tracing._tag order._last order._exchanges",
}  # fmt: skip


def module_state() -> set[str]:
    """Names of modules that are assigned to by a function, or are containers that can be changed."""
    found = set()
    for file in Path(convmesh.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text())
        names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for node in tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            value = getattr(node, "value", None)
            empty = isinstance(value, ast.List | ast.Dict | ast.Set) or (
                isinstance(value, ast.Call) and getattr(value.func, "id", "") in ("set", "dict", "list", "deque", *WEAK)
            )
            names |= {t.id for t in targets if isinstance(t, ast.Name) and empty and t.id.islower()}
        found |= {f"{file.stem}.{name}" for name in names}
    return found


WEAK = ("WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "WeakTensorKeyDictionary")


def test_all_state_of_modules_is_known() -> None:
    own = {
        f"{owner.__name__.split('.')[-1]}.{name}"
        for owner, name in process_state.PER_RANK
        if hasattr(owner, "__file__")
    }
    shared = {name for names in SHARED.values() for name in names.split()}
    assert module_state() - own - shared == set(), "a rank's own (process_state.PER_RANK), or shared, and why?"
    assert shared - module_state() == set()
    assert all(hasattr(owner, name) for owner, name in process_state.PER_RANK)


def test_ranks_are_not_taken_for_those_of_an_earlier_simulation() -> None:
    """Threads have the numbers of dead ones, and meshes of one shape are equal; what is cached is by rank."""

    def meshes(mesh: DeviceMesh) -> DeviceMesh:
        x = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)], src_data_rank=None)
        assert torch.equal(x.redistribute(placements=[Replicate()]).to_local(), torch.arange(7.0))
        return mesh

    found = [mesh for _ in range(4) for mesh in convmesh.simulate(meshes, 5)]
    assert len(set(found)) == 20


def test_nothing_keeps_tensors_of_a_simulation() -> None:
    def groups() -> int:
        gc.collect()
        return sum(type(one).__name__ == "Group" for one in gc.get_objects())

    convmesh.simulate(lambda mesh: [distribute_tensor(torch.rand(4, 4), mesh).sum().full_tensor()], 4)
    before = groups()
    convmesh.simulate(lambda mesh: [distribute_tensor(torch.rand(4, 4), mesh).sum().full_tensor()], 4)
    assert groups() <= before
