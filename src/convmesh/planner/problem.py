"""What is planned: a training step, its inputs, and how mesh dimensions shard them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_iter

from .. import _torch
from ..training import distribute, from_region, region

Step = Callable[..., object]
Build = Callable[[DeviceMesh], Step]
Mesh = Mapping[str, int]

DATA = "data"
# The names of mesh dimensions for the batch and the spatial dimensions of tensors with so many of the latter.
SPATIAL: dict[int, tuple[str, ...]] = {0: (), 1: ("w",), 2: ("h", "w"), 3: ("d", "h", "w")}
OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class PlanError(ValueError):
    """What was asked for cannot be planned. The message is one line, and says what would help.

    Examples:
        >>> convmesh.plan(nn.ReLU(), {"input": (1, 1, 8, 8)}, {"h": 9})
        Traceback (most recent call last):
        convmesh.planner.problem.PlanError: h=9 is more ranks than the 8 indices that they would share: take fewer
    """


@dataclass(frozen=True)
class Input:
    """A tensor that a step is given: its global shape and its type.

    `over` are the mesh dimensions that it is distributed over, if not all: with FSDP2 over "data", for which each rank
    has samples of its own, it is `over=("d", "h")` and the shape has the samples of one.

    Examples:
        >>> convmesh.Input((1, 512, 512, 512), torch.int64).shape
        (1, 512, 512, 512)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    over: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Problem:
    """A step, and its inputs by the names of its arguments. `dims` says which dimension of the first input a mesh
    dimension shards; other inputs are sharded where they have a dimension of that size in the same place, counted from
    the end for spatial ones."""

    build: Build
    inputs: Mapping[str, Input]
    dims: Mapping[str, int]
    own: bool = False  # a step of the user's own, which may ask for mesh dimensions by their names

    @property
    def first(self) -> Input:
        return next(iter(self.inputs.values()))

    def mesh(self, sizes: Mesh) -> dict[str, int]:
        """Drop mesh dimensions of one rank, unless the step may ask for them by name."""
        return dict(sizes) if self.own else {name: size for name, size in sizes.items() if size > 1} or dict(sizes)

    def step(self, mesh: DeviceMesh) -> Step:
        made = self.build(mesh)
        if not callable(made):
            raise PlanError(f"the function that is given a mesh returns {made!r}: return the step, which is called")
        return made

    def extent(self, name: str) -> int | None:
        """Return the size of the dimension of the first input that a mesh dimension shards; None where there is
        none."""
        over = self.first.over
        return None if over is not None and name not in over else self.first.shape[self.dims[name]]

    def sharded(self, given: Input, names: Mesh | tuple[str, ...]) -> dict[str, int]:
        """Return which mesh dimension shards which dimension of an input."""
        found = {}
        for name in names:
            dim = self.dims[name]
            at = dim if dim == 0 else dim - len(self.first.shape) + len(given.shape)
            if 0 <= at < len(given.shape) and given.shape[at] == self.first.shape[dim]:
                found[name] = at
        return found

    def tensors(self, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        for name, given in self.inputs.items():
            part = mesh if given.over is None else mesh[given.over]
            dims = self.sharded(given, tuple(part.mesh_dim_names or ()))
            own = [one.stop - one.start for one in region(given.shape, part, **dims)]
            made[name] = from_region(torch.zeros(own, dtype=given.dtype), given.shape, part, **dims)
        return made


def problem(
    step: nn.Module | Build, inputs: Mapping[str, Any], dims: Mapping[str, int] | None, optimizer: str, precision: str
) -> Problem:
    """Check what was given to `plan`, and return it as a `Problem`."""
    if not isinstance(inputs, Mapping) or not inputs:
        raise PlanError('no inputs: give their shapes by name, such as inputs={"x": (1, 1, 512, 512, 512)}')
    if not callable(step) or isinstance(step, type):
        raise PlanError(f"{step!r} is no step: give a model, or a function that is given a mesh and returns the step")
    given = {name: _input(name, value) for name, value in inputs.items()}
    first = next(iter(given.values()))
    known = _usual_dims(len(first.shape)) if dims is None else dict(dims)
    for name, dim in known.items():
        if not 0 <= dim < len(first.shape):
            raise PlanError(f"dims={{{name!r}: {dim}}}: an input of shape {first.shape} has no such dimension")
    if isinstance(step, nn.Module) and any(map(nn.parameter.is_lazy, (*step.parameters(), *step.buffers()))):
        raise PlanError(f"this {type(step).__name__} has lazy parameters: run it once on a small input before")
    build = partial(_training, step, optimizer, precision) if isinstance(step, nn.Module) else step
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"unknown optimizer {optimizer!r}: choose one of {', '.join(OPTIMIZERS)}, or give a step")
    if precision not in PRECISIONS:
        raise PlanError(f"unknown precision {precision!r}: choose one of {', '.join(PRECISIONS)}, or give a step")
    return Problem(build, given, known, not isinstance(step, nn.Module))


def check_mesh(asked: Problem, mesh: Mesh) -> None:
    shape = asked.first.shape
    if not isinstance(mesh, Mapping) or not mesh:
        raise PlanError(f"the mesh is {mesh!r}: give sizes by name, such as {{'d': 4, 'h': 2}}")
    for name, size in mesh.items():
        if name not in asked.dims:
            raise PlanError(
                f"the mesh dimension {name!r} shards nothing of an input of shape {shape}: "
                f"use {', '.join(asked.dims)}, or say which dimension by dims={{{name!r}: 2}}"
            )
        if not isinstance(size, int) or size < 1:
            raise PlanError(f"{name}={size!r} is no number of ranks: take 1 or more")
        extent = asked.extent(name)
        if extent is not None and size > extent:
            raise PlanError(f"{name}={size} is more ranks than the {extent} indices that they would share: take fewer")


def ranks_of(mesh: Mesh) -> int:
    return prod(mesh.values())


def words(mesh: Mesh) -> str:
    ranks = ranks_of(mesh)
    named = " x ".join(f"{name} {size}" for name, size in mesh.items() if size > 1)
    return f"{named} ({ranks} ranks)" if named else "1 rank"


def _usual_dims(ndim: int) -> dict[str, int]:
    names = SPATIAL.get(ndim - 2)
    if names is None:
        raise PlanError(f"an input with {ndim} dimensions: say what is sharded, such as dims={{'data': 0, 'h': 2}}")
    return {DATA: 0, **{name: 2 + number for number, name in enumerate(names)}}


def _input(name: str, value: Any) -> Input:
    if isinstance(value, Input):
        return value
    if isinstance(value, torch.Tensor):
        return Input(tuple(value.shape), value.dtype)
    try:
        shape = tuple(int(size) for size in value)
    except (TypeError, ValueError):
        raise PlanError(f"the input {name} is {value!r}: give a shape, a tensor or convmesh.Input") from None
    if min(shape, default=0) < 1:
        raise PlanError(f"the input {name} of shape {shape} has no elements: give positive sizes")
    return Input(shape)


def _training(model: nn.Module, optimizer: str, precision: str, mesh: DeviceMesh) -> Step:
    """Make a training step of a model, whose loss is the mean of all that it returns."""
    placed = distribute((with_values if _torch.has_values(mesh) else without_values)(model), mesh)
    trained = [parameter for parameter in placed.parameters() if parameter.requires_grad]
    made = OPTIMIZERS[optimizer](trained, lr=1e-3, foreach=True) if trained else None  # type: ignore[call-arg]
    dtype = PRECISIONS[precision]

    def step(*args: Any, **kwargs: Any) -> None:
        if made is not None:
            made.zero_grad()
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
            output = placed(*args, **kwargs)
            loss = sum(tensor.float().mean() for tensor in _floating(output))
        if not isinstance(loss, torch.Tensor):
            raise PlanError("the model returns no floating point tensor to make a loss of: give a step of your own")
        del output
        if made is not None:
            loss.backward()
            made.step()

    return step


def _floating(output: Any) -> list[torch.Tensor]:
    leaves = tree_iter(dict(output) if isinstance(output, Mapping) else output)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def with_values(model: nn.Module) -> nn.Module:
    """Copy a module; where its parameters have no values, they get some."""
    with _torch.no_modes():  # it is nothing that the step needs
        made = copy.deepcopy(model)
    if any(tensor.is_meta for tensor in (*made.parameters(), *made.buffers())):
        made = made.to_empty(device="cpu")
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.detach().fill_(0.01 if tensor.is_floating_point() else 0)
    return made


def without_values(model: nn.Module) -> nn.Module:
    """Copy a module without the values of its parameters and buffers."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes = torch.empty_like(tensor, device=_torch.DEVICE)
        if isinstance(tensor, nn.Parameter):
            sizes = nn.Parameter(sizes, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = sizes
    return copy.deepcopy(model, memo)
