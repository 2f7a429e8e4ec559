"""Random crops, flips and intensities by MONAI's transforms, on volumes of which no rank reads more than its region.

torchrun --nproc-per-node 4 examples/augmented_volumes.py --mesh 2x2
torchrun --nproc-per-node 8 examples/augmented_volumes.py --mesh 4x2 --folder scans --crop 96,96,96 --steps 20000

Crops are views of memory maps: slicing reads nothing, and then each rank reads its region of the crop. Flips and
intensities work on the sharded crop, as on any tensor. Needs monai: `pip install monai`.
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import count
from pathlib import Path

import monai
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import mesh_of, numbers, say
from monai.transforms import Compose, RandAdjustContrastd, RandFlipd, RandScaleIntensityd, RandSpatialCropd

import convmesh
from convmesh.models import UNet

monai.data.set_track_meta(False)  # plain tensors in place of MetaTensors, which DTensors cannot be


class Crops:
    """A random crop of each volume in a folder, and of its labels."""

    def __init__(self, folder: Path, size: tuple[int, ...]):
        self.images = sorted(folder.glob("image*.npy"))
        self.labels = sorted(folder.glob("label*.npy"))
        self.crop = RandSpatialCropd(["image", "label"], size, random_size=False)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.crop.set_random_state(torch.initial_seed())  # of this sample and epoch, the same on all ranks
        # "c", because torch takes memory that could be written; nothing is.
        paths = {"image": self.images[index], "label": self.labels[index]}
        mapped = {name: torch.from_numpy(np.load(path, mmap_mode="c")) for name, path in paths.items()}
        return self.crop(mapped)


def make_volumes(folder: Path) -> Path:
    """Bright balls in noise, and where they are, in volumes of different shapes."""
    if dist.get_rank() == 0:
        random = np.random.default_rng(0)
        for number, shape in enumerate([(24, 26, 28), (28, 24, 30), (26, 30, 24)]):
            centre = random.uniform(8, 16, 3)[:, None, None, None]
            inside = ((np.indices(shape) - centre) ** 2).sum(0) < 36
            image = (inside + random.normal(0, 0.3, shape)).astype(np.float32)
            np.save(folder / f"image{number}.npy", image[None])
            np.save(folder / f"label{number}.npy", inside[None].astype(np.uint8))
    dist.barrier()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="ranks along the height x ranks along the width")
    parser.add_argument("--folder", type=Path, help="image*.npy and label*.npy, (1, D, H, W); made up if not given")
    parser.add_argument("--crop", type=numbers, default=(16, 16, 16))
    parser.add_argument("--channels", type=numbers, default=(8, 16))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=1, help="processes that read, for each rank")
    args = parser.parse_args()

    augment = Compose([
        RandFlipd(["image", "label"], prob=0.5, spatial_axis=1),
        RandFlipd(["image", "label"], prob=0.5, spatial_axis=2),
        RandScaleIntensityd("image", factors=0.2, prob=0.8),
        RandAdjustContrastd("image", gamma=(0.7, 1.5), prob=0.8),  # by the extremes of the whole crop
    ])  # fmt: skip
    with mesh_of(args.mesh, "h", "w") as mesh, tempfile.TemporaryDirectory() as scratch:
        shared = [scratch]
        dist.broadcast_object_list(shared)  # the first rank's folder, for the volumes that it makes
        samples = Crops(args.folder or make_volumes(Path(shared[0])), args.crop)
        space = {"h": 3, "w": 4}
        batches = convmesh.loader(
            samples, mesh, batch_size=1, dims={"image": space, "label": space}, shuffle=True, num_workers=args.workers
        )
        torch.manual_seed(0)
        net = UNet(3, in_channels=1, out_channels=2, channels=args.channels, strides=(2,) * (len(args.channels) - 1))
        model = convmesh.distribute(net, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = 0
        for epoch in count():
            batches.set_epoch(epoch)
            for batch in batches:
                if step == args.steps:
                    break
                augment.set_random_state(step)  # the same on all ranks, and on any number of them
                sample = augment({name: value[0] for name, value in batch.items()})
                loss = F.cross_entropy(model(sample["image"][None]), sample["label"].long())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                say(f"step {step}: loss {loss.full_tensor():.4f}")
            if step == args.steps:
                break
        dist.barrier()  # the first rank takes its folder away


if __name__ == "__main__":
    main()
