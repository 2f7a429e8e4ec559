"""`torch.zeros` and similar calls in a model's forward pass: what they create are buffers, which may become sharded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .. import _torch
from .buffers import Buffer, Content, sizes_of
from .implicit_replication import constants_allowed

# Functions that create tensors, and their fill value; None if it does not matter, or is an argument.
FULL_OF: dict[Any, int | None] = {
    torch.zeros: 0, torch.zeros_like: 0, torch.Tensor.new_zeros: 0,
    torch.ones: 1, torch.ones_like: 1, torch.Tensor.new_ones: 1,
    torch.empty: None, torch.empty_like: None, torch.Tensor.new_empty: None,
    torch.full: None, torch.full_like: None, torch.Tensor.new_full: None,
}  # fmt: skip
NUMBER_AT = {torch.full: 1, torch.full_like: 1, torch.Tensor.new_full: 2}
LIKE = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)


class Factories(_torch.DeviceContext):
    """Context in which new tensors are created as buffers."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self._mesh = mesh

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in FULL_OF and self.is_plain:
            return function(*args, **kwargs or {})  # the usual case
        made = None
        if function in FULL_OF and not torch.compiler.is_compiling():
            # torch's own code handles local and global tensors itself: for example, the buffers of FSDP are local.
            package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            made = None if package in ("torch", "convmesh") else self._buffer(function, args, kwargs or {})
        return self.stock(function, types, args, kwargs or {}) if made is None else made

    def _buffer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Buffer | None:
        """Return None for a call that is left to torch."""
        model = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("input")
        special = any(kwargs.get(name) for name in ("out", "requires_grad", "pin_memory", "names"))
        if special or kwargs.get("layout") not in (None, torch.strided) or _torch.tracing() or _torch.in_transform():
            return None
        if isinstance(model, DTensor) and not isinstance(model, Buffer) and function in LIKE:
            return None  # it gets the placements of its model
        number = FULL_OF.get(function)
        if function in NUMBER_AT:
            place = NUMBER_AT[function]
            number = args[place] if place < len(args) else kwargs.get("fill_value")
            if not isinstance(number, Number):
                return None
        device = torch.device(kwargs.get("device") or (self.device if model is None else model.device))
        if device.type != self._mesh.device_type:
            return None
        with _torch.no_modes():
            args, kwargs = tree_map_only(torch.Tensor, sizes_of, (args, kwargs))
            meta = function(*args, **{**kwargs, "device": "meta"})
        return Buffer.make(Content(self._mesh, number), meta, device) if meta.dim() else None


@contextmanager
def implicit_replication(mesh: DeviceMesh) -> Iterator[None]:
    """Treat plain tensors as replicated DTensors within a block of code.

    Plain tensors that meet DTensors are taken as constants, equal on every rank. Tensors that the block creates with
    `torch.zeros`, `ones`, `full`, `empty` and `new_*`, and then fills with sharded values, become sharded. In the
    forward pass of a distributed module this is always on; use the context manager for code around it, such as MONAI's
    `sliding_window_inference`.

    Args:
        mesh: The mesh of the DTensors.

    Returns:
        A context manager.

    Examples:
        >>> x = convmesh.shard(torch.ones(2, 1, 8, 8), mesh, data=0, h=2)
        >>> with convmesh.enable(), convmesh.implicit_replication(mesh):
        ...     window = torch.linspace(0, 1, 8)
        ...     y = x * window
        >>> y.placements
        (Shard(dim=0), Shard(dim=2))
    """
    with constants_allowed(), Factories(mesh):
        yield
