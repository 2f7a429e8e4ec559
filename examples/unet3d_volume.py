"""Segmentation of a volume on disk with a 3-d U-Net: no rank ever reads or holds more than its own region of it.

torchrun --nproc-per-node 4 examples/unet3d_volume.py --mesh 2x2
torchrun --nproc-per-node 8 examples/unet3d_volume.py --mesh 4x2 --volume ct.npy --labels ct_labels.npy \
    --depth 128 --channels 32,64,128,256 --steps 20000 --checkpoints runs/ct

Start it again, with any number of ranks, and it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import mesh_of, numbers, say
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.models import UNet

SHAPE = (32, 24, 24)  # of the volume that is made where none is given


class Slabs:
    """Slabs of a volume and of its labels. They stay on disk: slicing a memory map reads nothing."""

    def __init__(self, volume: Path, labels: Path, depth: int):
        self.volume, self.labels, self.depth = volume, labels, depth

    def __len__(self) -> int:
        return len(np.load(self.volume, mmap_mode="r")) // self.depth

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        where = slice(index * self.depth, (index + 1) * self.depth)
        volume, labels = (np.load(path, mmap_mode="r") for path in (self.volume, self.labels))
        return volume[None, where], labels[where]


def make_volume(folder: Path) -> tuple[Path, Path]:
    """Bright balls in noise, and where they are."""
    paths = folder / "volume.npy", folder / "labels.npy"
    if dist.get_rank() == 0:
        random = np.random.default_rng(0)
        grid = np.indices(SHAPE)
        inside = np.zeros(SHAPE, dtype=bool)
        for _ in range(20):
            centre = random.uniform(0, SHAPE)[:, None, None, None]
            inside |= ((grid - centre) ** 2).sum(0) < random.uniform(2, 5) ** 2
        np.save(paths[0], (inside + random.normal(0, 0.5, SHAPE)).astype(np.float32))
        np.save(paths[1], inside.astype(np.uint8))
    dist.barrier()
    return paths


def batches(slabs: Slabs, mesh: DeviceMesh, workers: int, done: int) -> Iterator[tuple[DTensor, DTensor]]:
    """Slabs as (1, 1, D, H, W) and labels as (1, D, H, W), both sharded over height and width; other processes read.

    Without end, in a new order every epoch, and without the first ones, which are `done`.
    """
    dims = ({"h": 3, "w": 4}, {"h": 2, "w": 3})
    loader = convmesh.loader(
        slabs, mesh, batch_size=1, dims=dims, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    first, skipped = divmod(done, len(loader))
    for epoch in count(first):
        loader.set_epoch(epoch)
        yield from islice(loader, skipped if epoch == first else 0, None)


def segmentation_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy, and one minus the Dice score of the object: sums over the whole volume, wherever its parts are."""
    object_here = logits.softmax(1)[:, 1]
    common = (object_here * labels).sum()
    dice = (2 * common + 1) / (object_here.sum() + labels.sum() + 1)
    return F.cross_entropy(logits, labels) + 1 - dice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="ranks along the height x ranks along the width")
    parser.add_argument("--volume", type=Path, help="a .npy file with (D, H, W) numbers; made up if not given")
    parser.add_argument("--labels", type=Path, help="a .npy file with (D, H, W) zeros and ones")
    parser.add_argument("--depth", type=int, default=16, help="slices of the volume that are trained on at once")
    parser.add_argument("--channels", type=numbers, default=(8, 16))
    parser.add_argument("--steps", type=int, default=20, help="in all, with those before the last checkpoint")
    parser.add_argument("--workers", type=int, default=1, help="processes that read, for each rank")
    parser.add_argument("--checkpoints", type=Path, help="a folder that all ranks see")
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    args = parser.parse_args()

    with mesh_of(args.mesh, "h", "w") as mesh, tempfile.TemporaryDirectory() as scratch:
        shared = [scratch]
        dist.broadcast_object_list(shared)  # the first rank's folder, for the volume that it makes
        paths = (args.volume, args.labels) if args.volume else make_volume(Path(shared[0]))
        torch.manual_seed(0)
        net = UNet(3, in_channels=1, out_channels=2, channels=args.channels, strides=(2,) * (len(args.channels) - 1))
        model = convmesh.distribute(net, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        done = 0
        if args.checkpoints and convmesh.latest_checkpoint(args.checkpoints):
            done = convmesh.load_checkpoint(args.checkpoints, model, optimizer).step
            say(f"going on after step {done}")
        samples = islice(batches(Slabs(*paths, args.depth), mesh, args.workers, done), args.steps - done)
        for step, (x, labels) in enumerate(samples, done + 1):
            loss = segmentation_loss(model(x), labels.long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            say(f"step {step}: loss {loss.full_tensor():.4f}")
            if args.checkpoints and (step % args.every == 0 or step == args.steps):
                # It is written while training goes on; the end of the process waits for it.
                convmesh.save_checkpoint(args.checkpoints, model, optimizer, step=step, wait=False)
        dist.barrier()  # the first rank takes its folder away


if __name__ == "__main__":
    main()
