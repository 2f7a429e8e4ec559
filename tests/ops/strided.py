"""Operators on tensors that lie in memory in many ways: strides, views and copies as on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

import convmesh
from tests.cases import local_shape, place
from tests.compare import assert_close
from tests.opinfo import Case, samples_of, tensors_of

Change = Callable[[torch.Tensor], torch.Tensor]


def _reversed(t: torch.Tensor) -> torch.Tensor:
    """The last dimension outermost in memory."""
    order = list(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order) if t.dim() > 1 else t


def _channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 2 else t


def _with_gaps(t: torch.Tensor) -> torch.Tensor:
    """A part of a larger tensor: the last dimension's first indices."""
    return F.pad(t.double(), (0, 1)).to(t.dtype).narrow(-1, 0, t.shape[-1]) if t.dim() else t


def _with_gaps_last(t: torch.Tensor) -> torch.Tensor:
    return _with_gaps(t.movedim(1, -1)).movedim(-1, 1) if t.dim() > 2 else t


# How operands lie, on one device and here.
LAID: dict[str, Change] = {
    "contiguous": lambda t: t,
    "reversed": _reversed,
    "channels last": _channels_last,
    "with gaps": _with_gaps,
    "channels last with gaps": _with_gaps_last,
}


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same DTensor, whose local tensor lies in an order other than the global one, with odd strides of size 1."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.detach().to_local()
    order = list(reversed(range(local.dim())))
    local = local.permute(order).contiguous().permute(order)
    stride = [
        step if size > 1 else 1 + 3 * dim
        for dim, (size, step) in enumerate(zip(local.shape, local.stride(), strict=True))
    ]
    local = local.as_strided(local.shape, stride)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@dataclass(frozen=True)
class Lies:
    """How a tensor lies in memory: everything that a program can ask of it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()  # along a dimension of size 1, or of no elements at all, it says nothing
    contiguous: bool = True
    channels_last: bool = True

    @staticmethod
    def of(tensor: torch.Tensor) -> Lies:
        if not tensor.numel():
            return Lies(tuple(tensor.shape))
        stride = tuple(step if size > 1 else 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        return Lies(tuple(tensor.shape), stride, tensor.is_contiguous(), tensor.is_contiguous(memory_format=format))


# torch has other formulas of gradients for tensors of other classes, or ours is above autograd: values are equal, and
# a parameter's gradient is laid as the parameter when it is accumulated.
OTHER_FORMULAS = (
    "masked_select", "max", "min", "prod", "nn.functional.linear", "nn.functional.scaled_dot_product_attention",
)  # fmt: skip


def call(case: Case, change: Change) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and the tensors of the sample, each of which `change` has been applied to."""
    fn, samples = samples_of(case.operator, case.variant, case.in_place)
    sample = samples[case.sample]
    leaves, tree = tree_flatten((sample.input, sample.args, sample.kwargs))
    changed = [change(t).detach().requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for t in leaves]
    input, args, kwargs = tree_unflatten(changed, tree)
    torch.default_generator.manual_seed(1)
    return tensors_of(fn(input, *args, **kwargs)), tensors_of(changed)


def written(case: Case, change: Change) -> list[torch.Tensor]:
    """The tensors of the sample after something was written into the last result: changed, if that is a view."""
    with torch.no_grad():
        results, tensors = call(case, change)
        results[-1].mul_(2)
    return tensors


def run(case: Case, change: Change, gradient: Change) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results, and gradients of all tensors of the sample, each of which `change` has been applied to."""
    results, tensors = call(case, change)
    asked = [t for t in tensors if t.requires_grad]
    heads = [t for t in results if t.requires_grad]
    if not heads or not asked:
        return results, []
    given = [gradient(head.detach().cos()) for head in heads]
    return results, list(torch.autograd.grad(heads, asked, given, allow_unused=True))


def compare(mesh: DeviceMesh, case: Case, alone: bool, laid: str, oddly: bool = False) -> None:
    """Values, strides and formats of all results and gradients against one device."""
    lay = LAID[laid]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected, wanted = run(case, lambda t: lay(t.detach().clone()), lambda t: t)
        except Exception:
            return  # one device refuses it
        try:
            left = written(case, lambda t: lay(t.detach().clone()))
        except Exception:
            left = []  # such as into an expanded tensor
        sample = samples_of(case.operator, case.variant, case.in_place)[1][case.sample]
        inputs = tensors_of(sample.input)
        own, shapes = {id(t) for t in inputs}, {t.shape for t in inputs if t.dim() > case.dim}
        change = odd if oddly else lambda t: t

        def sharded(t: torch.Tensor) -> torch.Tensor:
            alike = t.shape in shapes and (id(t) in own or not alone)
            return change(lay(place(t.detach().clone(), mesh, (case.dim if alike else "R",))))

        results, gradients = run(case, sharded, change)
        for mine, theirs in zip(written(case, sharded) if left else [], left, strict=True):
            _compare(mine, theirs, strides=False)
    for mine, theirs in [*zip(results, expected, strict=True), *zip(gradients, wanted, strict=True)]:
        if mine is not None and theirs is not None:
            _compare(mine, theirs, strides=not oddly and (theirs.requires_grad or case.operator not in OTHER_FORMULAS))


def _compare(mine: torch.Tensor, theirs: torch.Tensor, strides: bool) -> None:
    scale = max([1.0, *theirs[theirs.isfinite()].double().abs().tolist()])
    if isinstance(mine, DTensor):
        if strides:
            assert Lies.of(mine) == Lies.of(theirs), f"strides {mine.stride()}, on one device {theirs.stride()}"
        assert mine.to_local().shape == local_shape(mine)
        mine = mine.detach().full_tensor()
    assert_close(mine, theirs.detach(), scale)


def compare_all(mesh: DeviceMesh, batch: list[tuple[Any, ...]]) -> None:
    with convmesh.enable():
        for arguments in batch:
            try:
                compare(mesh, *arguments)
            except BaseException as error:
                error.add_note(f"in {arguments}")
                raise
