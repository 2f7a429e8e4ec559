"""The exceptions of the library, whose messages say why something cannot be done exactly, and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from ..comm import caller
from .layout import Layout


class ShardingError(ValueError):
    """An operator or a function cannot do exactly what was asked for on these tensors.

    The message names the operator, the shapes and placements, a remedy, and the line of your code. All ranks raise it
    alike, before anything is sent, so that no rank is left waiting. It is a `ValueError`.

    Examples:
        >>> convmesh.shard(torch.zeros(4, 4), mesh, width=1)
        Traceback (most recent call last):
        convmesh.sharding.errors.ShardingError: shard: the mesh has no dimension 'width', only ('data', 'h')
          remedy: mesh dimension = tensor dimension, e.g. data=0, h=1
          at ...
    """

    def __init__(self, message: str = ""):
        # Without super().__init__, which dynamo cannot trace; __new__ keeps the message.
        self.where = None if torch.compiler.is_compiling() else caller()

    def __str__(self) -> str:
        return f"{super().__str__()}{f'{chr(10)}  at {self.where}' if self.where else ''}"


class PlainTensor(ShardingError):  # noqa: N818 - says what it met
    """A plain tensor was passed together with DTensors."""


class Unfit(Exception):  # noqa: N818 - says what it met
    """A case that a rule cannot run, with reason and remedy; its caller adds the operator and the tensors."""

    def __init__(self, reason: str, remedy: str):
        super().__init__(reason, remedy)
        self.reason, self.remedy = reason, remedy


def refuse(
    operator: str,
    reason: str,
    tensors: Iterable[tuple[str, object]],
    remedy: str,
    kind: type[ShardingError] = ShardingError,
) -> ShardingError:
    """Return the error for `operator`; `tensors` are (name, value) pairs, described by shape and placements."""
    lines = [f"{operator}: {reason}"]
    lines += [f"  {name}: {_describe(value)}" for name, value in tensors if value is not None]
    return kind("\n".join([*lines, f"  remedy: {remedy}"]))


def _describe(value: object) -> str:
    if isinstance(value, DTensor | Layout):
        mesh = value.device_mesh if isinstance(value, DTensor) else value.mesh
        sizes = " x ".join(
            f"{name} {size}" if name else str(size)
            for name, size in zip(mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.shape, strict=True)
        )
        return f"{tuple(value.shape)} {value.dtype}, placements {value.placements} on a mesh of {sizes}"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}, a plain torch.Tensor"
    return repr(value)
