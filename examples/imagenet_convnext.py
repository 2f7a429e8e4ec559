"""Image classification with a ConvNeXt: the batch is sharded over "data", each image over "h".

torchrun --nproc-per-node 4 examples/imagenet_convnext.py --mesh 2x2
torchrun --nproc-per-node 8 examples/imagenet_convnext.py --mesh 4x2 --data imagenet/train --size 224 --classes 1000 \
    --depths 3,3,9,3 --dims 96,192,384,768 --batch 256 --steps 100000 --autocast
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import DEVICE, mesh_of, numbers, say
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.models import ConvNeXt


class Stripes:
    """Pictures to learn from without a data set: noisy stripes, whose direction is the class."""

    def __init__(self, classes: int, size: int, images: int = 256):
        self.classes, self.size, self.images = classes, size, images

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(index)  # every rank sees the same image
        label = index % self.classes
        angle = np.pi * label / self.classes
        y, x = np.mgrid[: self.size, : self.size]
        waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) * 1.5 + random.uniform(0, 6))
        image = waves + random.normal(0, 0.3, (3, self.size, self.size))
        return image.astype(np.float32), np.array(label)


class Pictures:
    """A folder of pictures, one folder for each class. They are cropped alike on all ranks, so nothing is random."""

    def __init__(self, folder: str, size: int):
        from torchvision import datasets, transforms  # needed for this alone

        steps = [transforms.Resize(size), transforms.CenterCrop(size), transforms.ToTensor()]
        self.pictures = datasets.ImageFolder(folder, transforms.Compose(steps))

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, np.ndarray]:
        image, label = self.pictures[index]
        return image, np.array(label)


def batches(samples: Any, mesh: Any, size: int, workers: int) -> Iterator[tuple[DTensor, DTensor]]:
    """Without end, in a new order every epoch. Each rank keeps its rows of the images of its part of the batch."""
    dims = ({"data": 0, "h": 2}, {"data": 0})
    loader = convmesh.loader(
        samples, mesh, batch_size=size, dims=dims, shuffle=True, drop_last=True, num_workers=workers
    )
    for epoch in count():
        loader.set_epoch(epoch)
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="ranks along the batch x ranks along the images' height")
    parser.add_argument("--data", help="a folder of pictures in a folder for each class (needs torchvision)")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--depths", type=numbers, default=(1, 1))
    parser.add_argument("--dims", type=numbers, default=(16, 32))
    parser.add_argument("--batch", type=int, default=16, help="images of all ranks together")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    args = parser.parse_args()

    with mesh_of(args.mesh, "data", "h") as mesh:
        samples = Pictures(args.data, args.size) if args.data else Stripes(args.classes, args.size)
        torch.manual_seed(0)
        model = ConvNeXt(args.depths, args.dims, num_classes=args.classes, layer_scale=0.1, stochastic_depth=0.1)
        model = convmesh.distribute(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        for step, (x, y) in enumerate(islice(batches(samples, mesh, args.batch, args.workers), args.steps)):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=args.autocast):
                output = model(x)
                loss = F.cross_entropy(output, y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 10 == 0 or step == args.steps - 1:
                right = (output.argmax(1) == y).float().mean()
                say(f"step {step}: loss {loss.full_tensor():.3f}, accuracy {right.full_tensor():.0%}")


if __name__ == "__main__":
    main()
