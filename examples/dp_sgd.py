"""Training with differential privacy (DP-SGD): every sample's gradient is clipped, and noise is added to their sum.

torchrun --nproc-per-node 4 examples/dp_sgd.py

The batch is sharded over the ranks. No gradient of a single sample is ever stored. Which epsilon the noise
stands for depends on how batches are drawn: ask an accountant, such as the one of Opacus. Whoever knows the
seed can subtract the noise: by default it is drawn from the operating system, known to the ranks alone, never printed.
torch's generators are not made to withstand an attack, though: against one, draw the noise from one that is.
"""

from __future__ import annotations

import argparse
import secrets

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import DEVICE, mesh_of, say
from torch import nn

import convmesh

CLASSES, SIZE = 4, 16


def small_cnn() -> nn.Module:
    """Group norms, because a batch norm would mix the samples, and then none has a gradient of its own."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def make_samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise with a bright corner, which is the class."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (count,), generator=random)
    images = torch.randn(count, 1, SIZE, SIZE, generator=random)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = half * (label // 2), half * (label % 2)
        image[:, top : top + half, left : left + half] += 0.5
    return images, labels


def secret_seed() -> int:
    """The first rank's draw, on all ranks."""
    drawn = [secrets.randbits(63)]
    dist.broadcast_object_list(drawn)
    return drawn[0]


@torch.no_grad()
def evaluate(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    return F.cross_entropy(model(images.to(DEVICE)), labels.to(DEVICE)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="4", help="ranks along the batch")
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks together")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--max-norm", type=float, default=1.0, help="to which a sample's gradient is clipped")
    parser.add_argument("--noise", type=float, default=1.0, help="its deviation, in multiples of max-norm")
    parser.add_argument("--seed", type=int, help="to repeat a trial, not for private data (default: drawn, secret)")
    args = parser.parse_args()

    with mesh_of(args.mesh, "data") as mesh:
        convmesh.enable()  # the fastest algorithm for each layer's gradients of single samples
        torch.manual_seed(
            secret_seed() if args.seed is None else args.seed
        )  # all ranks start alike, draw the same batches and add the same noise
        model = small_cnn().to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        images, labels = make_samples(16 * args.batch)
        for step in range(args.steps):
            drawn = torch.randperm(len(images))[: args.batch]
            x, y = (convmesh.shard(each[drawn].to(DEVICE), mesh, data=0) for each in (images, labels))
            total = convmesh.clipped_gradient(model, F.cross_entropy, x, y, max_norm=args.max_norm)
            for name, parameter in model.named_parameters():
                noise = torch.randn(parameter.shape) * (args.noise * args.max_norm)
                parameter.grad = (total[name].to_local() + noise.to(DEVICE)) / args.batch
            optimizer.step()
            if step % 10 == 0 or step == args.steps - 1:
                say(f"step {step}: loss {evaluate(model, images[:256], labels[:256]):.3f}")


if __name__ == "__main__":
    main()
