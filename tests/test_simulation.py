"""`convmesh.simulate`: many ranks in one process, against one; and what it says and leaves behind."""

from __future__ import annotations

import _thread
import ast
import copy
import gc
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import convmesh
from convmesh.models import UNet
from convmesh.simulation import process_state
from tests.cases import place, places_of
from tests.compare import assert_close, same_on_all_ranks
from tests.launch import launch
from tests.ops.families import ALL_FUNCTIONS, Example

NAMES = ("d", "h", "w")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """Of every test here: process groups, threads, environment, hooks and rules are as they were."""

    def state() -> list[Any]:
        module = dist.distributed_c10d
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return [
            dist.is_initialized(), dict(module._world.pg_map), module._world, module._backend, sys.excepthook,
            dict(dist.Backend._plugins), environment, torch.get_num_threads(),
            convmesh.api.registry.installed(), convmesh.batching.installed(), torch.get_default_dtype(),
            [getattr(owner, name) for owner, name in process_state.OWN[:2]],
            {thread.name for thread in threading.enumerate() if thread.name.startswith("convmesh")},
        ]  # fmt: skip

    before = state()
    yield
    assert state() == before


def along(mesh: DeviceMesh, *dims: int) -> tuple[Any, ...]:
    """The last mesh dimensions shard these; the others replicate."""
    return (*["R"] * (mesh.ndim - len(dims)), *dims)[-mesh.ndim :]


@pytest.mark.parametrize("shape", [(8,), (2, 2, 2), (1, 4, 2), (4, 4)])
def test_every_family(shape: tuple[int, ...]) -> None:
    """11 rows over 8 ranks: the last two own nothing."""
    examples = {name: Example(name) for name in ALL_FUNCTIONS}

    def check(mesh: DeviceMesh) -> int:
        for name, example in examples.items():
            at = along(mesh, 2) if mesh.ndim == 1 else along(mesh, 2, 3)
            leaves = [
                place(tensor, mesh, at if number == 0 else ("R",) * mesh.ndim).requires_grad_()
                for number, tensor in enumerate(example.tensors)
            ]
            y = example.function(*leaves)
            gradients = example.backward(y, leaves)
            for found, expected in zip([y, *gradients], [example.expected, *example.gradients], strict=True):
                wanted = place(expected.detach(), mesh, tuple("R" if p == "P" else p for p in places_of(found)))
                mine = found.redistribute(placements=wanted.placements).to_local()
                try:
                    assert_close(mine.detach(), wanted.to_local(), expected.detach().abs().max().item())
                except AssertionError as error:
                    raise AssertionError(f"{name}: {error}") from None
        return len(examples)

    with convmesh.enable():
        assert convmesh.simulate(check, shape, NAMES[-len(shape) :]) == [len(ALL_FUNCTIONS)] * torch.Size(shape).numel()


def trained(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    found = [*losses, *net.parameters()]
    return [(one.full_tensor() if isinstance(one, DTensor) else one).detach() for one in found]


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), pytest.param((4, 4, 4), marks=pytest.mark.long("64 ranks train a network"))]
)
def test_a_network_of_volumes(shape: tuple[int, ...]) -> None:
    """Of 5 x 3 x 4 in its middle, where of 4 x 4 x 4 ranks some own nothing."""
    torch.manual_seed(0)
    net = UNet(3, 1, 2, (2, 4), (2,)).double()
    x = torch.randn(1, 1, 10, 6, 8, dtype=torch.float64)
    wanted = trained(copy.deepcopy(net), x)

    def train(mesh: DeviceMesh) -> list[torch.Tensor]:
        model = convmesh.distribute(copy.deepcopy(net), mesh)
        return trained(model, convmesh.shard(x, mesh, d=2, h=3, w=4))

    found = same_on_all_ranks(convmesh.simulate(train, shape, NAMES))
    for actual, one in zip(found, wanted, strict=True):
        assert_close(actual, one)


@pytest.mark.parametrize(("shape", "dims"), [((64,), (2,)), ((4, 4, 4), (0, 2, 3)), ((1, 8, 8), (1, 2, 3))])
def test_64_ranks(shape: tuple[int, ...], dims: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 2, 70, 9, dtype=torch.float64), torch.randn(2, 2, 3, 3, dtype=torch.float64)

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.batch_norm(F.conv2d(x, w, stride=2, padding=1), None, None, training=True), 2)

    dense = [tensor.clone().requires_grad_() for tensor in (x, w)]
    wanted = block(*dense)
    gradients = torch.autograd.grad(wanted.square().sum(), dense)

    def check(mesh: DeviceMesh) -> None:
        leaves = [place(x, mesh, dims).requires_grad_(), place(w, mesh, ("R",) * mesh.ndim).requires_grad_()]
        y = block(*leaves)
        found = torch.autograd.grad(y.square().sum(), leaves)
        for actual, one in zip([y, *found], [wanted, *gradients], strict=True):
            assert_close(actual.full_tensor().detach(), one.detach())

    with convmesh.enable():
        assert len(convmesh.simulate(check, shape, NAMES[-len(shape) :])) == 64


def test_results_are_in_the_order_of_ranks() -> None:
    def coordinate(mesh: DeviceMesh) -> tuple[Any, ...]:
        assert mesh.mesh_dim_names == ("h", "w")
        return *(mesh.get_coordinate() or ()), dist.get_rank(), dist.get_world_size()

    found = convmesh.simulate(coordinate, (2, 3), ("h", "w"))
    assert found == [(h, w, 3 * h + w, 6) for h in range(2) for w in range(3)]
    assert convmesh.simulate(lambda mesh: mesh.shape, 2) == [(2,)] * 2


class OddError(ValueError):
    """An error of a user's own."""


def test_an_error_of_a_rank() -> None:
    """It is raised as it is, with its traceback and a note; the others end where they would wait for it."""
    went_on: list[int] = []

    def fails(mesh: DeviceMesh) -> None:
        if dist.get_rank() == 5:
            raise OddError("of one rank")
        dist.barrier()
        went_on.append(dist.get_rank())

    with pytest.raises(OddError, match="of one rank") as caught:
        convmesh.simulate(fails, (4, 2), ("h", "w"))
    assert any("rank 5 (h=2, w=1) of 8" in note for note in caught.value.__notes__)
    assert any(entry.name == "fails" for entry in caught.traceback)
    assert not went_on

    def refused(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.rand(8, 3), mesh, [Shard(0)], src_data_rank=None)
        with convmesh.enable():
            x + torch.rand(8, 3)

    with pytest.raises(convmesh.ShardingError, match="plain") as alike:
        convmesh.simulate(refused, 4)
    assert any("ranks 0-3 of 4" in note for note in alike.value.__notes__)

    def differently(mesh: DeviceMesh) -> None:
        raise [OddError, KeyError][dist.get_rank()](str(dist.get_rank()))

    with pytest.raises(OddError) as different:
        convmesh.simulate(differently, 2)
    assert any("KeyError: '1'" in note for note in different.value.__notes__)


def test_an_error_in_backward_and_inside_of_a_collective() -> None:
    """Ranks are ended from within autograd and from within torch's collectives, too."""

    def fails(mesh: DeviceMesh) -> None:
        x = distribute_tensor(torch.rand(1, 2, 9, 9), mesh, [Shard(2)], src_data_rank=None).requires_grad_()
        w = distribute_tensor(torch.rand(2, 2, 3, 3), mesh, [Replicate()], src_data_rank=None)
        y = F.conv2d(x, w, padding=1)
        if dist.get_rank() == 2:
            y.register_hook(lambda _: 1 / 0)
        y.sum().backward()

    with convmesh.enable(), pytest.raises(ZeroDivisionError) as caught:
        convmesh.simulate(fails, 3)
    assert any("rank 2" in note for note in caught.value.__notes__)


def test_the_person_at_the_keyboard() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it

    def runs_for_ever(mesh: DeviceMesh) -> None:
        if dist.get_rank() == 1:
            _thread.interrupt_main()
            while True:
                time.sleep(0.001)
        dist.barrier()

    try:
        with pytest.raises(KeyboardInterrupt):
            convmesh.simulate(runs_for_ever, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert convmesh.simulate(lambda mesh: dist.get_rank(), 2) == [0, 1]


def reduces_other_sizes(mesh: DeviceMesh) -> None:
    dist.all_reduce(torch.ones(3 + (dist.get_rank() == 2)))


def calls_other_collectives(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(3))


def sends_other_counts(mesh: DeviceMesh) -> None:
    counts = [1] * 4
    sent = [2, 1, 1, 1] if dist.get_rank() == 2 else counts
    dist.all_to_all_single(torch.ones(4), torch.ones(sum(sent)), counts, sent)


def returns_early(mesh: DeviceMesh) -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))


def goes_by_other_groups(mesh: DeviceMesh) -> None:
    """Rank 0 waits for 2, which waits for 3, which waits for 1, which waits for 0."""
    for name in ("h", "w") if dist.get_rank() in (0, 3) else ("w", "h"):
        dist.all_reduce(torch.ones(3), group=mesh.get_group(name))


def waits_for_a_key(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.distributed_c10d._get_default_store().wait(["not there"])


def waits_for_a_message(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 2:
        dist.recv(torch.ones(3), 1)


def catches_it(mesh: DeviceMesh) -> None:
    try:
        reduces_other_sizes(mesh)
    except Exception:
        return


MISTAKES = {
    reduces_other_sizes: r"(?s)ranks 0-1: all_reduce of \(3,\).*test_simulation.py:.*rank 2: all_reduce of \(4,\)",
    calls_other_collectives: "(?s)not doing the same.*rank 2: barrier",
    sends_other_counts: r"(?s)not what another expects.*rank 2: .*sends \[2, 1, 1, 1\]",
    returns_early: r"(?s)ranks 0-1, 3: waits for all_reduce of .*rank 2 did not come.*rank 2: has returned",
    goes_by_other_groups: "(?s)wait for what never comes.*rank 2: waits for all_reduce",
    waits_for_a_key: "(?s)rank 2: waits for .*not there in the store, at .*test_simulation.py",
    waits_for_a_message: r"(?s)rank 2: waits for rank 1 to send \(3,\)",
    catches_it: "not doing the same",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_ranks_that_do_not_do_the_same(mistake: Any) -> None:
    with pytest.raises(convmesh.MismatchError, match=MISTAKES[mistake]):
        convmesh.simulate(mistake, (2, 2), ("h", "w"))


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


def test_all_collectives() -> None:
    def run(mesh: DeviceMesh) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        mine, everyone = torch.full((2,), float(rank)), [torch.full((2,), float(other)) for other in range(size)]
        for op, expected in (("SUM", 6), ("MAX", 3), ("MIN", 0), ("PRODUCT", 0), ("AVG", 1.5)):
            tensor = mine.clone()
            work = dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=True)
            assert work is not None
            work.wait()
            assert work.is_completed()
            assert tensor.tolist() == [expected] * 2
        bits = torch.tensor([1 << rank])
        dist.all_reduce(bits, dist.ReduceOp.BOR)
        assert bits.item() == 15
        gathered = [torch.empty(2) for _ in range(size)]
        dist.all_gather(gathered, mine)
        assert torch.equal(torch.stack(gathered), torch.stack(everyone))
        flat = torch.empty(2 * size)
        dist.all_gather_single(flat, mine)
        assert torch.equal(flat, torch.cat(everyone))
        part = torch.empty(2)
        dist.reduce_scatter_single(part, torch.cat(everyone))
        assert part.tolist() == [4.0 * rank] * 2
        dist.reduce_scatter(part, [tensor.clone() for tensor in everyone], dist.ReduceOp.AVG)
        assert part.tolist() == [1.0 * rank] * 2
        dist.all_to_all(gathered, [mine + other for other in range(size)])
        assert [tensor[0].item() for tensor in gathered] == [float(other + rank) for other in range(size)]
        dist.broadcast(part, 2)
        assert part.tolist() == [2.0] * 2
        dist.reduce(total := mine.clone(), 1)
        assert rank != 1 or total.tolist() == [6.0] * 2
        dist.scatter(part, everyone if rank == 3 else None, 3)
        assert torch.equal(part, mine)
        dist.gather(mine, gathered if rank == 3 else None, 3)
        assert rank != 3 or torch.equal(torch.stack(gathered), torch.stack(everyone))
        said: list[Any] = [None] * size
        dist.all_gather_object(said, {"rank": rank})
        assert said == [{"rank": other} for other in range(size)]
        requests = [dist.P2POp(dist.isend, mine, (rank + 1) % size), dist.P2POp(dist.irecv, part, (rank - 1) % size)]
        for request in dist.batch_isend_irecv(requests):
            request.wait()
        assert part.tolist() == [float((rank - 1) % size)] * 2
        if rank == 0:
            assert sorted(dist.recv(part) for _ in range(1, size)) == list(range(1, size))
        else:
            dist.send(mine, 0)
        store = dist.distributed_c10d._get_default_store()
        store.set(f"from {rank}", "here")
        store.wait([f"from {other}" for other in range(size)])
        store.add("count", 1)
        dist.barrier()
        assert store.add("count", 0) == size

    convmesh.simulate(run, 4)


def test_checkpoints(tmp_path: Path) -> None:
    def save(mesh: DeviceMesh) -> list[torch.Tensor]:
        net = convmesh.distribute(nn.Conv2d(2, 3, 3).double(), mesh)
        pending = convmesh.save_checkpoint(tmp_path, net, step=1, wait=False)
        path = pending.wait()
        wanted = [parameter.detach().full_tensor().clone() for parameter in net.parameters()]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        convmesh.load_checkpoint(path.parent, net)
        assert all(torch.equal(p.full_tensor(), one) for p, one in zip(net.parameters(), wanted, strict=True))
        return wanted

    same_on_all_ranks(convmesh.simulate(save, (2, 2), ("h", "w")))


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
        "agreement._paths partial._kept implicit_replication._modules foreach._stepping ranks._groups tracing._kept "
        "idle_optimizers._models idle_optimizers._replaced idle_optimizers._looked_at opened._shared",
    "by thread": "tensor_lists._known",
    "the same for all ranks of one machine": "benchmark._fastest choice._when_forgotten rules._known shapes._known",
    "rules, which the first rank installs, and the end of the simulation removes":
        "registry._rules registry._behaviour registry._composites registry._guards registry._replaced "
        "registry._switches registry._undo registry._library registration._library view_writeback.watching_reads "
        "view_writeback._stop_watching copy_notes.anything_noted",
    "not used by simulated ranks: their group compares, and compiled code is not theirs":
        "agreement._timeout agreement._undo tracing._tag order._last order._exchanges order._zeros",
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
    own = {f"{owner.__name__.split('.')[-1]}.{name}" for owner, name in process_state.OWN if hasattr(owner, "__file__")}
    shared = {name for names in SHARED.values() for name in names.split()}
    assert module_state() - own - shared == set(), "a rank's own (process_state.OWN), or shared, and why?"
    assert shared - module_state() == set()
    assert all(hasattr(owner, name) for owner, name in process_state.OWN)


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
