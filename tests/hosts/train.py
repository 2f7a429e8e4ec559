"""A training script as users have for a cluster: it goes on from the last checkpoint, on as many hosts as there are."""

from __future__ import annotations

import argparse
import json
import socket
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import convmesh
from convmesh.comm.shared_memory.mailbox import mailbox_of
from convmesh.models import UNet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=8)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step: time to pull a cable")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout))
    ranks = dist.get_world_size()
    shape = (ranks // 2, 2) if ranks % 2 == 0 and ranks > 2 else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("h", "w")[: len(shape)])
    torch.manual_seed(0)
    model = convmesh.distribute(UNet(2, 1, 2, (4, 6), (2,)).double(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if convmesh.latest_checkpoint(options.folder / "checkpoints"):
        done = convmesh.load_checkpoint(options.folder / "checkpoints", model, optimizer).step
    (options.folder / f"rank-of-{socket.gethostname()}").write_text(str(dist.get_rank()))
    for step in range(done + 1, options.steps + 1):
        x = torch.randn(2, 1, 18, 20, dtype=torch.float64)
        dims = {"h": 2, "w": 3} if len(shape) == 2 else {"h": 2}
        labels = convmesh.shard((x[:, 0] > 0).long(), mesh, **{name: dim - 1 for name, dim in dims.items()})
        loss = F.cross_entropy(model(convmesh.shard(x, mesh, **dims)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        value = loss.full_tensor().item()
        if step % 2 == 0:
            convmesh.save_checkpoint(options.folder / "checkpoints", model, optimizer, step=step)
        shared = [mailbox_of(mesh.get_group(dim)) is not None for dim in range(mesh.ndim)]
        if dist.get_rank() == 0:
            with (options.folder / "losses").open("a") as file:
                file.write(json.dumps({"step": step, "loss": value, "ranks": ranks, "shared": shared}) + "\n")
        time.sleep(options.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
