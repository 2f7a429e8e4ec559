"""Tensors that a model makes in its forward pass, with `torch.zeros` and the like, to fill them with sharded values.

Nobody knows when such a buffer is made whether it will be a constant, or be filled with a part of an activation. So it
is decided when it first meets a DTensor: then it becomes one that lies as the other does, of which a rank makes its
own part alone. Until then it is a plain tensor, the same on every rank, which is made when an operator first needs its
values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_iter, tree_map_only

from .. import _torch
from .errors import refuse
from .implicit_replication import constants_allowed
from .layout import Layout, dense_stride

aten = torch.ops.aten

Take = Callable[[torch.Tensor], torch.Tensor]
COPIES = (aten.clone.default, aten._to_copy.default)


@dataclass
class Content:
    """What a buffer is full of: one number (None where it does not matter), or what `take` takes of another buffer."""

    mesh: DeviceMesh
    number: Any = None
    origin: torch.Tensor | None = None
    origin_shape: tuple[int, ...] = ()
    take: Take | None = None
    values: torch.Tensor | None = None  # once an operator has needed them


class Buffer(_torch.LateDTensor):
    """A new tensor of one number, or a view of one."""

    content: Content

    @staticmethod
    def make(content: Content, meta: torch.Tensor, device: torch.device) -> Buffer:
        """With the sizes of `meta`."""
        mesh = content.mesh
        layout = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(meta.shape), tuple(meta.stride()), meta.dtype)
        made: Buffer = _torch.LateDTensor.of(Buffer, torch.empty(0, dtype=meta.dtype, device=device), layout.spec)
        made.content = content
        return made

    def plain(self) -> torch.Tensor:
        """All of it, as a plain tensor; what is written into that is written into this."""
        content = self.content
        if content.values is None:
            if isinstance(content.origin, Buffer) and content.take is not None:
                content.values = content.take(content.origin.plain())
            else:
                content.values = self._filled(tuple(self.shape), tuple(self.stride()))
        return content.values

    def _filled(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)
        return made if self.content.number is None else made.fill_(self.content.number)

    def root(self) -> Buffer:
        return self.content.origin.root() if isinstance(self.content.origin, Buffer) else self

    def undecided(self) -> bool:
        """Whether it is a buffer still. A view of one that has become a DTensor becomes one here."""
        origin, take = self.content.origin, self.content.take
        if origin is None or take is None or (isinstance(origin, Buffer) and origin.undecided()):
            return True
        if tuple(origin.shape) != self.content.origin_shape:
            raise refuse("a view", "of a tensor that was turned in place since", (("tensor", origin),),
                         "use the operator that returns a new tensor, such as unsqueeze")  # fmt: skip
        with torch.no_grad():
            made: Any = take(origin)
        self.become(_torch.local_of(made), _torch.eager_spec_of(made))
        return False

    def become(self, local: torch.Tensor, spec: _torch.Spec) -> None:
        super().become(local, spec)
        del self.content  # which may be all of it

    def tolist(self) -> Any:
        return self.plain().tolist() if self.undecided() else self.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force) if self.undecided() else self.numpy(force=force)

    def settle(self) -> None:
        mesh = self.content.mesh
        self.lie_at((Replicate(),) * mesh.ndim, mesh)

    def lie_at(self, placements: tuple[Placement, ...], mesh: DeviceMesh) -> None:
        """Become a DTensor; of a view, what it is a view of becomes one at `placements`, and this follows."""
        if not self.undecided():
            return
        if isinstance(self.content.origin, Buffer):
            self.content.origin.lie_at(placements, mesh)
            self.undecided()
            return
        layout = Layout(mesh, placements, tuple(self.shape), tuple(self.stride()), self.dtype)
        self.become(self._part(layout), layout.spec)

    def _part(self, layout: Layout) -> torch.Tensor:
        """This rank's."""
        if layout.mesh.get_coordinate() is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        values = self.content.values
        if values is None:
            shape = [layout.local_shape[dim] for dim in layout.memory_order]
            stride = dense_stride(tuple(shape), torch.contiguous_format)
            return self._filled(layout.local_shape, tuple(stride[at] for at in layout.back_from_memory_order))
        if not layout.cuts:
            return values
        for dim in layout.cuts:
            own = layout.own(dim)
            values = values.narrow(dim, own.start, len(own))
        return layout.laid(values.clone())  # a copy, so that the whole goes

    def meet(self, others: Sequence[DTensor], written: bool) -> None:
        """Become a DTensor that lies as others do: what is written into it, or what it is used beside."""
        if not self.undecided():
            return
        mesh, root = others[0].device_mesh, self.root()
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for other in sorted(others, key=torch.Tensor.numel):
            if other.device_mesh != mesh or not (written or other.shape == self.shape):
                continue
            for mesh_dim, placement in enumerate(other.placements):
                dim = self._dim_beside(other, placement.dim) if type(placement) is Shard else None
                at = None if dim is None else _dim_with(root, self.stride(dim))
                if at is not None:
                    placements[mesh_dim] = Shard(at)
        self.lie_at(tuple(placements), mesh)

    def _dim_beside(self, other: DTensor, dim: int) -> int | None:
        """Which dimension of this one goes along with a dimension of what is written into it, or says where: the same
        from the end, or from the start as for a mask; of the same size rather than of another."""
        candidates = [at for at in (dim + self.dim() - other.dim(), dim) if 0 <= at < self.dim()]
        alike = [at for at in candidates if self.shape[at] == other.shape[dim]]
        return next(iter(alike + candidates), None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        buffers = [tensor for tensor in tensors if isinstance(tensor, Buffer) and tensor.undecided()]
        others = [tensor for tensor in tensors if isinstance(tensor, DTensor) and not isinstance(tensor, Buffer)]
        if _torch.is_composite(operator):
            return _torch.composite(operator, args, kwargs)  # it comes whole in inference mode only
        if buffers and not others:
            return _on_plain(operator, args, kwargs)
        for buffer in buffers:
            outs = (args[:1], *kwargs.values()) if operator._schema.is_mutable else ()
            buffer.meet(others, any(buffer is leaf for leaf in tree_iter(outs)))
        return operator(*args, **kwargs)


def _dim_with(root: torch.Tensor, step: int) -> int | None:
    """The dimension along which a view moves that goes `step` elements further in memory."""
    return next((dim for dim, own in enumerate(root.stride()) if 0 < own <= step < own * root.shape[dim]), None)


def _on_plain(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator among constants."""
    first = args[0] if args else None
    if isinstance(first, Buffer):
        if _torch.is_view_operator(operator):
            return _torch.as_view(operator, args, kwargs, _views(operator, first, args[1:], kwargs))
        content = first.root().content
        if operator in COPIES and content.values is None and kwargs.get("device") in (None, first.device):
            meta = operator(_model(first), **{name: value for name, value in kwargs.items() if name != "device"})
            return Buffer.make(Content(content.mesh, content.number), meta, first.device)
    plain_args, plain_kwargs = tree_map_only(Buffer, Buffer.plain, (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    if not operator._schema.is_mutable:
        return result
    turns = torch.Tag.inplace_view in operator.tags  # it changes the sizes that torch knows of the tensor
    return first if result is plain_args[0] and not turns else _torch.as_view(operator, args, kwargs, result)


def _views(operator: Any, whole: Buffer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def view(meta: torch.Tensor, number: int | None) -> Buffer:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            taken: Any = operator(tensor, *args, **kwargs)
            return taken if number is None else taken[number]  # type: ignore[no-any-return]

        content = Content(whole.content.mesh, origin=whole, origin_shape=tuple(whole.shape), take=take)
        return Buffer.make(content, meta, whole.device)

    metas = operator(_model(whole), *args, **kwargs)
    return view(metas, None) if isinstance(metas, torch.Tensor) else [view(m, n) for n, m in enumerate(metas)]


# What makes new tensors, and what they are full of; None where that does not matter, or is an argument.
FULL_OF: dict[Any, int | None] = {
    torch.zeros: 0, torch.zeros_like: 0, torch.Tensor.new_zeros: 0,
    torch.ones: 1, torch.ones_like: 1, torch.Tensor.new_ones: 1,
    torch.empty: None, torch.empty_like: None, torch.Tensor.new_empty: None,
    torch.full: None, torch.full_like: None, torch.Tensor.new_full: None,
}  # fmt: skip
NUMBER_AT = {torch.full: 1, torch.full_like: 1, torch.Tensor.new_full: 2}
LIKE = (torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like)


class Factories(_torch.DeviceContext):
    """Within it, new tensors are buffers."""

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self._mesh = mesh

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = None
        if function in FULL_OF and not torch.compiler.is_compiling():
            # torch's own code knows what is on one rank and what on all: the buffers of FSDP are local.
            package = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            made = None if package in ("torch", "convmesh") else self._buffer(function, args, kwargs or {})
        return self.stock(function, types, args, kwargs or {}) if made is None else made

    def _buffer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Buffer | None:
        """None for a call that is left to torch."""
        model = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.get("input")
        special = any(kwargs.get(name) for name in ("out", "requires_grad", "pin_memory", "names"))
        if special or kwargs.get("layout") not in (None, torch.strided) or _torch.tracing() or _torch.in_transform():
            return None
        if isinstance(model, DTensor) and not isinstance(model, Buffer) and function in LIKE:
            return None  # it lies as its model does
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
            args, kwargs = tree_map_only(torch.Tensor, _model, (args, kwargs))
            meta = function(*args, **{**kwargs, "device": "meta"})
        return Buffer.make(Content(self._mesh, number), meta, device) if meta.dim() else None


def _model(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


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
