"""One image too large for one device, at full resolution: each rank reads its region, and writes its region.

torchrun --nproc-per-node 4 examples/huge_image_inference.py --mesh 2x2 --check
torchrun --nproc-per-node 8 examples/huge_image_inference.py --mesh 4x2 --image slide.npy --weights net.pt
"""

from __future__ import annotations

import argparse
import copy
import resource
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import DEVICE, mesh_of, numbers, say
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.models import UNet


def make_image(path: Path, height: int, width: int) -> Path:
    """Ripples in three colours, written line by line."""
    image = np.lib.format.open_memmap(path, "w+", np.uint8, (3, height, width))
    columns = np.arange(width)
    for row in range(height):
        for colour in range(3):
            image[colour, row] = 127 + 127 * np.sin((columns + colour * row) / 31)
    return path


def peak_memory() -> int:
    """The most bytes that this rank has held so far."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def as_input(pixels: np.ndarray) -> torch.Tensor:
    """(3, H, W) bytes -> (1, 3, H, W)"""
    return torch.from_numpy(pixels[None].astype(np.float32) / 255).to(DEVICE)


@torch.inference_mode()
def infer(model: torch.nn.Module, mesh: DeviceMesh, image: np.ndarray, output: np.ndarray) -> None:
    """`image` and `output` are memory maps of (3, H, W) and (C, H, W), of which a rank touches its region only."""
    where = convmesh.region(image.shape, mesh, h=1, w=2)
    x = convmesh.from_region(as_input(image[where]), (1, *image.shape), mesh, h=2, w=3)
    y = model(x)
    output[convmesh.region(y)[1:]] = y.to_local()[0].cpu().numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="ranks along the height x ranks along the width")
    parser.add_argument("--image", type=Path, help="a .npy file with (3, H, W) bytes; made up if not given")
    parser.add_argument("--size", type=numbers, default=(1000, 1500), help="height,width of the image that is made")
    parser.add_argument("--output", type=Path, help="the .npy file that is written; thrown away if not given")
    parser.add_argument("--channels", type=numbers, default=(8, 16, 32))
    parser.add_argument("--classes", type=int, default=2)
    parser.add_argument("--weights", type=Path, help="a state dict for the U-Net; random weights if not given")
    parser.add_argument("--check", action="store_true", help="compare with one process, which needs the memory for it")
    args = parser.parse_args()

    with mesh_of(args.mesh, "h", "w") as mesh, tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        net = UNet(2, 3, args.classes, args.channels, strides=(2,) * (len(args.channels) - 1)).eval()
        if args.weights:
            net.load_state_dict(torch.load(args.weights, map_location="cpu"))
        alone = copy.deepcopy(net).to(DEVICE) if args.check else None
        model = convmesh.distribute(net, mesh)

        files = [args.image, args.output or Path(scratch) / "output.npy"]
        if dist.get_rank() == 0:
            files[0] = files[0] or make_image(Path(scratch) / "image.npy", *args.size)
            shape = (args.classes, *np.load(files[0], mmap_mode="r").shape[1:])
            np.lib.format.open_memmap(files[1], "w+", np.float32, shape)
        dist.broadcast_object_list(files)  # all write into the first rank's file, which is there now
        image, output = np.load(files[0], mmap_mode="r"), np.load(files[1], mmap_mode="r+")

        before = peak_memory()
        infer(model, mesh, image, output)
        output.flush()
        grown = torch.tensor([peak_memory() - before], device=DEVICE)
        dist.all_reduce(grown, dist.ReduceOp.MAX)
        say(f"{tuple(image.shape)} pixels on {mesh.size()} ranks, {files[1]}")
        say(f"peak memory: {grown.item() / 1e6:.0f} MB a rank; the image alone is {image.size * 4 / 1e6:.0f} MB")
        if alone is not None and dist.get_rank() == 0:
            with torch.inference_mode():
                expected = alone(as_input(image))[0].cpu().numpy()
            say(f"one process: {(peak_memory() - before) / 1e6:.0f} MB")
            say(f"greatest difference: {np.abs(output - expected).max() / np.abs(expected).max():.1e} of the greatest")
        dist.barrier()  # the first rank takes its folder away


if __name__ == "__main__":
    main()
