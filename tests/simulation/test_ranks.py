"""`convmesh.simulate`: many ranks in one process, against one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.models import UNet
from tests.cases import place, places_of
from tests.compare import assert_close, same_on_all_ranks
from tests.ops.families import ALL_FUNCTIONS, Example

NAMES = ("d", "h", "w")


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
