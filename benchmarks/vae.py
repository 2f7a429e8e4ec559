"""Decoding an image with an autoencoder of diffusers: on ranks, in one process, and in one process by its own tiles."""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from math import log10
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from benchmarks.measure import interleave, timed
from benchmarks.training import returning_memory
from convmesh.process_memory import peak_memory
from tests.harness import Pool

LATENTS = (1, 4, 96, 96)
CHANNELS = (32, 64, 64, 64)
TILE = 256  # pixels
CORES = 2
ONE, TILES = "one process", "one process, its own tiles"
WAYS: dict[str, tuple[int, ...]] = {ONE: (1, 1), TILES: (1, 1), "2 ranks": (2, 1), "4 ranks": (2, 2)}


def autoencoder() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    made = AutoencoderKL(
        block_out_channels=CHANNELS, layers_per_block=1, norm_num_groups=16, sample_size=TILE,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
    )  # fmt: skip
    return made.eval()


def latents() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(LATENTS)


class Decoder:
    """A way to decode; its results are kept for those that are compared with it."""

    def __init__(self, mesh: DeviceMesh | None, tiles: bool = False) -> None:
        vae, z = autoencoder(), latents()
        if mesh is not None:
            vae, z = convmesh.distribute(vae, mesh), convmesh.shard(z, mesh, h=2, w=3)
        if tiles:
            vae.enable_tiling()
        self.vae, self.z = vae, z

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        image: torch.Tensor = self.vae.decode(self.z).sample
        return image


_decoders: dict[str, Decoder] = {}


def prepare(mesh: DeviceMesh, way: str) -> None:
    """One process has all cores, and each rank one thread."""
    warnings.simplefilter("ignore")
    convmesh.enable()
    torch.set_num_threads(CORES if mesh.size() == 1 else 1)
    if way not in _decoders:
        _decoders[way] = Decoder(None if mesh.size() == 1 else mesh, way == TILES)


def memory(mesh: DeviceMesh, way: str) -> int:
    prepare(mesh, way)
    return peak_memory(_decoders[way])


def seconds(mesh: DeviceMesh, way: str) -> float:
    prepare(mesh, way)
    for dim in range(mesh.ndim):
        dist.barrier(mesh.get_group(dim))
    return timed(_decoders[way])


def result(mesh: DeviceMesh, way: str) -> torch.Tensor:
    prepare(mesh, way)
    made = _decoders[way]()
    return made.full_tensor() if mesh.size() > 1 else made  # type: ignore[attr-defined, no-any-return]


def psnr(image: torch.Tensor, expected: torch.Tensor) -> str:
    error = (image - expected).square().mean().item()
    peak = (expected.max() - expected.min()).item()
    return "-" if error == 0 else f"{10 * log10(peak**2 / error):.0f} dB"


def run(pool: Pool, console: Console, rounds: int, options: argparse.Namespace) -> None:
    ways = [way for way in WAYS if way == ONE or options.only in way]
    on = {way: {"mesh": WAYS[way], "names": ("h", "w"), "timeout": 3600} for way in ways}
    with returning_memory() as other:
        peaks = {way: max(other.run(memory, way, **where)) for way, where in on.items()}
    images = {way: pool.run(result, way, **where)[0] for way, where in on.items()}
    times = interleave(
        {
            way: partial(lambda way, where: max(pool.run(seconds, way, **where)), way, where)
            for way, where in on.items()
        },
        max(3, rounds // 2),
    )
    title = f"AutoencoderKL.decode, latents {LATENTS}; one process: {times[ONE]:.2f} s, {peaks[ONE] / 2**20:.0f} MiB"
    table = Table("", "time", "peak memory of a rank", "greatest difference", "PSNR", title=title)
    for way in ways:
        difference = (images[way] - images[ONE]).abs().max().item() / images[ONE].abs().max().item()
        relative = (f"{of[way] / of[ONE]:.2f}" for of in (times, peaks))
        table.add_row(way, *relative, f"{difference:.0e}", psnr(images[way], images[ONE]))
    console.print(table)
