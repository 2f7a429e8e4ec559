"""Training steps as any rank of 4,096: of the first, of one in the middle and of the last one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.dry_runs import MESHES, Network, begin, step_of
from convmesh.models import ConvNeXt, UNet, resnet18
from tests.launch import FORK_SERVER

RANKS = (0, 1234, 4095)
NETWORKS = {
    "ConvNeXt": Network(lambda: ConvNeXt((1, 1), (2, 4), num_classes=3), (1, 3, 8, 8), False),
    "ResNet": Network(lambda: resnet18(3, 3, width=2), (1, 3, 32, 32), False),
    "U-Net 2-d": Network(lambda: UNet(2, 3, 2, (2, 3), (2,)), (1, 3, 4, 4), True),
    "U-Net 3-d": Network(lambda: UNet(3, 1, 2, (2, 3), (2,)), (1, 1, 4, 4, 4), True),
}


def as_ranks_of_large_meshes() -> None:
    torch.set_num_threads(1)
    for shape, rank in zip(MESHES, RANKS, strict=True):
        mesh = begin(shape, rank)
        for network in NETWORKS.values():
            step = step_of(network, mesh)
            step()
            step()
        dist.destroy_process_group()


def test_steps_as_ranks_of_large_meshes() -> None:
    process = FORK_SERVER.Process(target=as_ranks_of_large_meshes)
    process.start()
    process.join(100)
    alive = process.is_alive()
    process.kill()
    assert not alive, "a step takes for ever"
    assert process.exitcode == 0
