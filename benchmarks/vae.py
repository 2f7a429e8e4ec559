"""Decoding an image with an autoencoder of diffusers: on ranks, in one process, and in one process by its own tiles."""

from __future__ import annotations

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
MESHES: dict[int, tuple[int, ...]] = {2: (2, 1), 4: (2, 2)}


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


_ways: dict[str, Decoder] = {}


def prepare(mesh: DeviceMesh, way: str) -> None:
    warnings.simplefilter("ignore")
    convmesh.enable()
    _ways[way] = Decoder(mesh if way == "ranks" else None, way == "tiles")


def memory(mesh: DeviceMesh, way: str) -> int:
    prepare(mesh, way)
    return peak_memory(_ways[way])


def seconds(mesh: DeviceMesh, way: str) -> float:
    if mesh.size() > 1:
        torch.set_num_threads(1)
        dist.barrier()
    return timed(_ways[way])


def result(mesh: DeviceMesh, way: str) -> torch.Tensor:
    prepare(mesh, way)
    made = _ways[way]()
    return made.full_tensor() if way == "ranks" else made  # type: ignore[attr-defined, no-any-return]


def psnr(image: torch.Tensor, expected: torch.Tensor) -> str:
    error = (image - expected).square().mean().item()
    peak = (expected.max() - expected.min()).item()
    return "-" if error == 0 else f"{10 * log10(peak**2 / error):.0f} dB"


def run(pool: Pool, console: Console, rounds: int) -> None:
    alone: dict[str, Any] = {"mesh": (1, 1), "names": ("h", "w"), "timeout": 3600}
    many = {count: {**alone, "mesh": mesh} for count, mesh in MESHES.items()}
    rows: dict[str, tuple[str, dict[str, Any]]] = {"one process": ("whole", alone), "its own tiles": ("tiles", alone)}
    rows |= {f"{count} ranks": ("ranks", on) for count, on in many.items()}
    with returning_memory() as other:
        peaks = {name: max(other.run(memory, way, **on)) for name, (way, on) in rows.items()}
    images = {name: pool.run(result, way, **on)[0] for name, (way, on) in rows.items()}
    measured = {
        name: partial(lambda way, on: max(pool.run(seconds, way, **on)), way, on)
        for name, (way, on) in rows.items() if name != "4 ranks"
    }  # fmt: skip
    pool.run(prepare, "ranks", **many[2])  # the last one that was prepared was of 4 ranks
    times = interleave(measured, max(3, rounds // 2))
    table = Table("", "time", "peak memory of a rank", "greatest difference", "PSNR", title="AutoencoderKL.decode")
    first, expected = next(iter(rows)), images["one process"]
    for name in rows:
        time = f"{times[name] / times[first]:.2f}" if name in times else "(more ranks than cores)"
        difference = (images[name] - expected).abs().max().item() / expected.abs().max().item()
        table.add_row(
            name, time, f"{peaks[name] / peaks[first]:.2f}", f"{difference:.0e}", psnr(images[name], expected)
        )
    console.print(table)
