"""The device `acc`: memory that no CPU kernel can touch, and an account of what a GPU would have to wait for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from filelock import FileLock
from torch.utils import cpp_extension

from convmesh.kernels import batch_norm_fused, compiler
from convmesh.user_cache import cache_directory, make_private, trusted

NAME = "acc"
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared")


@cache
def install() -> None:
    """Let this process have the device; compiled once for a machine and a version of PyTorch."""
    torch.ops.load_library(_library())
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    from tests.accelerator import sync_norm  # whose kernels are for this device

    sync_norm.register()
    batch_norm_fused.register(NAME)


def host_alias(tensor: torch.Tensor) -> torch.Tensor:
    """The device's memory as a CPU tensor, for what plays hardware in a test."""
    alias: torch.Tensor = torch.ops.acc.host_alias(tensor.detach())
    return alias


def take_events() -> list[str]:
    """Copies between host and device, and waits of the host for the device, since the last call."""
    events: list[str] = torch.ops.acc.take_events()
    return events


def _library() -> Path:
    by = compiler.find()
    said = (SOURCE.read_text(), Path(__file__).read_text(), torch.__version__, compiler.version(by))
    digest = hashlib.sha256("".join(said).encode())
    make_private(cache_directory())
    path = trusted(cache_directory()) / f"accelerator-{digest.hexdigest()[:16]}.so"
    with FileLock(path.with_suffix(".lock"), timeout=compiler.LONGEST):
        if not path.exists():
            made = path.with_suffix(".new")
            folders = [f"-I{folder}" for folder in cpp_extension.include_paths()]
            libraries = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-ltorch_cpu", "-lc10"]
            command = [by, *FLAGS, *folders, str(SOURCE), "-o", str(made), *libraries]
            subprocess.run(command, check=True, timeout=compiler.LONGEST)
            made.rename(path)
    return path


def _module() -> ModuleType:
    """What `torch.cuda` is to a GPU, as far as PyTorch and tests ask for it."""
    module = ModuleType(f"torch.{NAME}")
    ops = torch.ops.acc

    def device(wanted: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(device: Any = None) -> None:
        ops.note("synchronize")

    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "_is_in_bad_fork": False, "device_count": 1, "current_device": 0,
        "get_amp_supported_dtype": [torch.bfloat16, torch.float16], "set_device": None, "_lazy_init": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(module, name, lambda *_, _answer=answer: _answer)
    for function in (device, synchronize):
        setattr(module, function.__name__, function)
    for name in ("manual_seed", "manual_seed_all"):
        setattr(module, name, ops.manual_seed)
    module.get_rng_state = lambda device=NAME: ops.get_rng_state()  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device=NAME: ops.set_rng_state(state)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module
