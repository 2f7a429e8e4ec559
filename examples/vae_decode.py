"""Latents of a large image or a video, decoded on several ranks without tiles: each rank writes its region.

torchrun --nproc-per-node 4 examples/vae_decode.py --mesh 2x2 --check
torchrun --nproc-per-node 4 examples/vae_decode.py --mesh 2x2 --kind video --check
torchrun --nproc-per-node 8 examples/vae_decode.py --mesh 4x2 --pretrained vae --latents z.npy --output image.npy
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import DEVICE, mesh_of, numbers, say
from diffusers import AutoencoderKL, AutoencoderKLWan

import convmesh

SMALL: dict[str, Any] = {
    "image": lambda: AutoencoderKL(
        block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ),
    "video": lambda: AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ),
}  # fmt: skip
KINDS = {"image": AutoencoderKL, "video": AutoencoderKLWan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="ranks along the height x ranks along the width")
    parser.add_argument("--kind", choices=KINDS, default="image")
    parser.add_argument("--pretrained", help="a folder for from_pretrained; a small network at random if not given")
    parser.add_argument("--latents", type=Path, help="a .npy file; drawn at random if not given")
    parser.add_argument("--size", type=numbers, help="shape of the latents that are drawn")
    parser.add_argument("--output", type=Path, help="the .npy file that is written; thrown away if not given")
    parser.add_argument("--check", action="store_true", help="compare with one process, which needs the memory for it")
    args = parser.parse_args()

    with mesh_of(args.mesh, "h", "w") as mesh, tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        kind = KINDS[args.kind]
        vae = kind.from_pretrained(args.pretrained) if args.pretrained else SMALL[args.kind]()
        vae = vae.to(DEVICE).eval()
        alone = copy.deepcopy(vae) if args.check else None
        vae = convmesh.distribute(vae, mesh)
        shape = args.size or ((1, 4, 40, 56) if args.kind == "image" else (1, 4, 3, 16, 24))
        latents = torch.randn(shape) if args.latents is None else torch.from_numpy(np.load(args.latents))

        with torch.inference_mode():
            z = convmesh.shard(latents, mesh, h=-2, w=-1)
            image = vae.decode(z).sample  # its own method, with its caches: no tiles, and so no seams
        files = [args.output or Path(scratch) / "output.npy"]
        if dist.get_rank() == 0:
            np.lib.format.open_memmap(files[0], "w+", np.float32, tuple(image.shape))
        dist.broadcast_object_list(files)  # all write into the first rank's file, which is there now
        output = np.load(files[0], mmap_mode="r+")
        output[convmesh.region(image)] = image.to_local().float().cpu().numpy()
        output.flush()
        dist.barrier()
        say(f"{tuple(latents.shape)} latents to {tuple(image.shape)} on {mesh.size()} ranks, {files[0]}")
        say(f"a rank wrote {tuple(image.to_local().shape)}")
        if alone is not None and dist.get_rank() == 0:
            with torch.inference_mode():
                expected = alone.decode(latents.to(DEVICE)).sample.float().cpu().numpy()
            say(f"greatest difference: {np.abs(output - expected).max() / np.abs(expected).max():.1e} of the greatest")
        dist.barrier()  # the first rank takes its folder away


if __name__ == "__main__":
    main()
