"""What every example begins and ends with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def mesh_of(sizes: str, *names: str) -> Iterator[DeviceMesh]:
    """A mesh such as 2x2 of the processes that torchrun has started: a GPU each, or CPU cores where there is none."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    yield init_device_mesh(DEVICE, tuple(map(int, sizes.split("x"))), mesh_dim_names=names)
    dist.destroy_process_group()  # not after an error: the other ranks may still be waiting for this one


def say(text: str) -> None:
    """One rank speaks for all."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def numbers(text: str) -> tuple[int, ...]:
    """An argument such as 16,32."""
    return tuple(map(int, text.split(",")))
