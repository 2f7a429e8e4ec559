"""Buffers: tensors that a forward pass creates with `torch.zeros` and the like, to fill them with sharded values.

When such a buffer is created, it is not known whether it will be a constant, or be filled with parts of an activation.
So that is decided when it is first used with a DTensor: then it becomes a DTensor with the same layout, and each rank
creates only its local tensor. Until then it is a plain tensor, the same on every rank, which is created when an
operator first needs its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_iter, tree_map_only

from .. import _torch
from .errors import refuse
from .layout import Layout, dense_stride

aten = torch.ops.aten

Take = Callable[[torch.Tensor], torch.Tensor]
COPIES = (aten.clone.default, aten._to_copy.default)


@dataclass
class Content:
    """The content of a buffer: one number (None if it does not matter), or what `take` returns for another buffer."""

    mesh: DeviceMesh
    number: Any = None
    origin: torch.Tensor | None = None
    origin_shape: tuple[int, ...] = ()
    take: Take | None = None
    values: torch.Tensor | None = None  # once an operator has needed them
    joined: bool = False  # whether a replicated tensor of the mesh was written into it


class Buffer(_torch.LateDTensor):
    """A new tensor filled with one number, or a view of one."""

    content: Content

    @staticmethod
    def make(content: Content, meta: torch.Tensor, device: torch.device) -> Buffer:
        """Make a buffer with the sizes, strides and dtype of `meta`."""
        mesh = content.mesh
        layout = Layout(mesh, (Replicate(),) * mesh.ndim, tuple(meta.shape), tuple(meta.stride()), meta.dtype)
        made: Buffer = _torch.LateDTensor.of(Buffer, torch.empty(0, dtype=meta.dtype, device=device), layout.spec)
        made.content = content
        return made

    def plain(self) -> torch.Tensor:
        """Return all of it as a plain tensor that shares its values: writes into one are seen in the other."""
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

    def is_buffer(self) -> bool:
        """Whether this is still a buffer. A view of a buffer that has become a DTensor becomes one here."""
        origin, take = self.content.origin, self.content.take
        if origin is None or take is None or (isinstance(origin, Buffer) and origin.is_buffer()):
            return True
        if tuple(origin.shape) != self.content.origin_shape:
            raise refuse("a view", "of a tensor whose dimensions were permuted in place since", (("tensor", origin),),
                         "use the operator that returns a new tensor, such as unsqueeze")  # fmt: skip
        with torch.no_grad():
            made: Any = take(origin)
        self.become(_torch.local_of(made), _torch.eager_spec_of(made))
        return False

    def become(self, local: torch.Tensor, spec: _torch.Spec) -> None:
        super().become(local, spec)
        del self.content  # it may hold the full tensor

    def tolist(self) -> Any:
        return self.plain().tolist() if self.is_buffer() else self.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force) if self.is_buffer() else self.numpy(force=force)

    def settle(self) -> None:
        mesh = self.content.mesh
        self.place_at((Replicate(),) * mesh.ndim, mesh)

    def place_at(self, placements: tuple[Placement, ...], mesh: DeviceMesh) -> None:
        """Become a DTensor with these placements. A view makes its base become one, and follows."""
        if not self.is_buffer():
            return
        if isinstance(self.content.origin, Buffer):
            self.content.origin.place_at(placements, mesh)
            self.is_buffer()
            return
        layout = Layout(mesh, placements, tuple(self.shape), tuple(self.stride()), self.dtype)
        self.become(self._part(layout), layout.spec)

    def _part(self, layout: Layout) -> torch.Tensor:
        """Return this rank's local tensor in `layout`."""
        if layout.mesh.get_coordinate() is None:
            return torch.empty(0, dtype=self.dtype, device=self.device)
        values = self.content.values
        if values is None:
            shape = [layout.local_shape[dim] for dim in layout.memory_order]
            stride = dense_stride(tuple(shape), torch.contiguous_format)
            return self._filled(layout.local_shape, tuple(stride[at] for at in layout.back_from_memory_order))
        if not layout.sharded_dims:
            return values
        for dim in layout.sharded_dims:
            own = layout.own(dim)
            values = values.narrow(dim, own.start, len(own))
        return layout.laid(values.clone())  # a copy, so that the full tensor is freed

    def adopt_layout(self, others: Sequence[DTensor], written: bool) -> None:
        """Become a DTensor with the layout of `others`, which are written into it or used with it."""
        if not self.is_buffer():
            return
        mesh, root = others[0].device_mesh, self.root()
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for other in sorted(others, key=torch.Tensor.numel):
            if other.device_mesh != mesh or not (written or _broadcast_together(other.shape, self.shape)):
                continue
            for mesh_dim, placement in enumerate(other.placements):
                dim = self._matching_dim(other, placement.dim) if type(placement) is Shard else None
                at = None if dim is None else _dim_with(root, self.stride(dim))
                if at is not None:
                    placements[mesh_dim] = Shard(at)
        self.place_at(tuple(placements), mesh)

    def _matching_dim(self, other: DTensor, dim: int) -> int | None:
        """Return which dimension of this tensor corresponds to dimension `dim` of `other`.

        It is the same from the end, or from the start, as for a mask; one of the same size is preferred.
        """
        candidates = [at for at in (dim + self.dim() - other.dim(), dim) if 0 <= at < self.dim()]
        alike = [at for at in candidates if self.shape[at] == other.shape[dim]]
        return next(iter(alike + candidates), None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        buffers = [tensor for tensor in tensors if isinstance(tensor, Buffer) and tensor.is_buffer()]
        others = [tensor for tensor in tensors if isinstance(tensor, DTensor) and not isinstance(tensor, Buffer)]
        if _torch.is_composite(operator):
            return _torch.composite(operator, args, kwargs)  # it is undecomposed in inference mode only
        outs = list(tree_iter((args[:1], *kwargs.values()))) if operator._schema.is_mutable else []
        if buffers and all(_is_replicated(other, buffers[0].content.mesh) for other in others):
            # A constant that is written into a buffer says nothing about what else it will be filled with.
            joins = bool(others) or any(buffer.root().content.joined for buffer in buffers)
            in_place = bool(outs) and _torch.signature(operator).written == {0}
            target = next((buffer for buffer in buffers if in_place and buffer is args[0]), None)
            if joins and target is not None:
                target.root().content.joined = True
            if not joins or target is not None or _torch.is_view_operator(operator):
                return _on_plain(operator, *tree_map_only(DTensor, _constant, (args, kwargs)))
            for buffer in buffers:
                buffer.settle()
            return operator(*args, **kwargs)
        for buffer in buffers:
            buffer.adopt_layout(others, any(buffer is leaf for leaf in outs))
        return operator(*args, **kwargs)


def _broadcast_together(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(one), reversed(other), strict=False))


def _is_replicated(tensor: DTensor, mesh: DeviceMesh) -> bool:
    return tensor.device_mesh == mesh and all(type(placement) is Replicate for placement in tensor.placements)


def _constant(tensor: DTensor) -> torch.Tensor:
    """The values of a replicated tensor; outside of its mesh any."""
    if isinstance(tensor, Buffer):
        return tensor
    present = tensor.device_mesh.get_coordinate() is not None
    return _torch.local_of(tensor) if present else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _dim_with(root: torch.Tensor, step: int) -> int | None:
    """Return the dimension of `root` along which a view with stride `step` moves."""
    return next((dim for dim, own in enumerate(root.stride()) if 0 < own <= step < own * root.shape[dim]), None)


def _on_plain(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose tensors are all buffers or constants."""
    first = args[0] if args else None
    if isinstance(first, Buffer):
        if _torch.is_view_operator(operator):
            return _torch.as_view(operator, args, kwargs, _views(operator, first, args[1:], kwargs))
        content = first.root().content
        if operator in COPIES and content.values is None and kwargs.get("device") in (None, first.device):
            meta = operator(sizes_of(first), **{name: value for name, value in kwargs.items() if name != "device"})
            return Buffer.make(Content(content.mesh, content.number), meta, first.device)
    plain_args, plain_kwargs = tree_map_only(Buffer, Buffer.plain, (args, kwargs))
    result = operator(*plain_args, **plain_kwargs)
    if not operator._schema.is_mutable:
        return result
    turns = torch.Tag.inplace_view in operator.tags  # it changes the sizes that torch has for the tensor
    return first if result is plain_args[0] and not turns else _torch.as_view(operator, args, kwargs, result)


def _views(operator: Any, base: Buffer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def view(meta: torch.Tensor, number: int | None) -> Buffer:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            taken: Any = operator(tensor, *args, **kwargs)
            return taken if number is None else taken[number]  # type: ignore[no-any-return]

        content = Content(base.content.mesh, origin=base, origin_shape=tuple(base.shape), take=take)
        return Buffer.make(content, meta, base.device)

    metas = operator(sizes_of(base), *args, **kwargs)
    return view(metas, None) if isinstance(metas, torch.Tensor) else [view(m, n) for n, m in enumerate(metas)]


def sizes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the sizes, strides and dtype of `tensor`."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
