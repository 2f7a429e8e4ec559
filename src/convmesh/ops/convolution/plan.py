"""Planning a convolution: the row of each mesh dimension, the layouts of operands and results, this rank's tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...geometry import Convolution
from ...sharding.layout import Layout, dense_stride
from ...sharding.plan_cache import planned
from ...sharding.sharding_table import Assignment, Row, Wanted, choose, input_placements, output_placements
from .local import LocalConvolution
from .table import backward_rows, forward_rows, local_groups
from .tile import ConvolutionTiling
from .validation import check_gradient, check_shapes


@dataclass(frozen=True)
class ForwardPlan:
    """The layouts of operands and output, and what this rank computes."""

    operands: tuple[Layout | None, ...]
    output: Layout
    local: LocalConvolution | None  # None on a rank outside of the mesh


def _output_format(conv: Convolution, input: Layout, weight: Layout) -> torch.memory_format:
    """As torch does it: channels_last if any of the two is, and there is such a kernel for the type."""
    last = [t.memory_format for t in (input, weight) if t.memory_format != torch.contiguous_format]
    if last and _stays_channels_last(conv.transposed, last[0], input.dtype, input.mesh.device_type):
        return last[0]
    return torch.contiguous_format


@planned
def _stays_channels_last(transposed: bool, format: torch.memory_format, dtype: torch.dtype, device: str) -> bool:
    """Seen on an image: of all that torch's choice of a kernel depends on, this is what the format depends on."""
    spatial = 2 if format == torch.channels_last else 3
    with _torch.no_modes():
        image, kernel = (
            torch.zeros((2, 2, *(size,) * spatial), dtype=dtype, device=device).contiguous(memory_format=format)
            for size in (4, 3)
        )
        ones, zeros = (1,) * spatial, (0,) * spatial
        result = torch.ops.aten.convolution.default(image, kernel, None, ones, zeros, ones, transposed, zeros, 1)
        return bool(result.is_contiguous(memory_format=format))


def plan_forward(input: Layout, weight: Layout, bias: Layout | None, *geometry: Any) -> ForwardPlan:
    named = (("input", input), ("weight", weight), ("bias", bias))
    conv = Convolution.of(len(weight.shape) - 2, *geometry)
    check_shapes("convolution", named, conv, input, weight, bias)
    rows = forward_rows(len(conv.stride), conv.transposed, conv.groups)
    chosen = choose("convolution", rows, named, fits=_fits(conv, input, weight))
    # torch cannot partition forward and backward passes that exchange halos whose sizes are symbolic expressions.
    _torch.need_numbers(*(input.shape[dim] for dim in input.sharded_dims if dim > 1))
    sizes = conv.output_size(input.shape[2:], weight.shape[2:])
    shape = (input.shape[0], conv.output_channels(weight.shape), *sizes)
    stride = dense_stride(shape, _output_format(conv, input, weight))
    output = Layout(input.mesh, output_placements(chosen, 0), shape, stride, input.dtype)
    operands = tuple(t and t.placed(input_placements(chosen, number)) for number, (_, t) in enumerate(named))
    here = _localize(chosen, conv, input.placed(input_placements(chosen, 0)), weight, shape) if input.present else None
    return ForwardPlan(operands, output, here)


@dataclass(frozen=True)
class BackwardPlan:
    """The layouts of operands, of the gradients as computed and as returned, and what this rank computes."""

    operands: tuple[Layout, ...]
    computed: tuple[Layout | None, ...]
    wanted: tuple[Layout | None, ...]
    local: LocalConvolution | None


def plan_backward(gradient: Layout, input: Layout, weight: Layout, *numbers: Any) -> BackwardPlan:
    *geometry, mask = numbers
    named = (("grad_output", gradient), ("input", input), ("weight", weight))
    conv = Convolution.of(len(weight.shape) - 2, *geometry)
    check_shapes("convolution_backward", named, conv, input, weight, None)
    check_gradient("convolution_backward", named, conv, gradient, input, weight)
    results = _results(conv, input, weight)
    wishes = [
        Wanted(result.placements, prod(result.shape), or_sharded=number > 0) if mask[number] else None
        for number, result in enumerate(results)
    ]
    rows = backward_rows(len(conv.stride), conv.transposed, conv.groups)
    chosen = choose("convolution_backward", rows, named, wishes, fits=_fits(conv, input, weight))
    computed: list[Layout | None] = [None] * len(results)
    wanted: list[Layout | None] = [None] * len(results)
    for number, (result, wish) in enumerate(zip(results, wishes, strict=True)):
        if wish is not None:
            placements = output_placements(chosen, number)
            computed[number] = result.placed(placements)
            wanted[number] = result.placed(tuple(wish.becomes(*entry) for entry in enumerate(placements)))
    operands = tuple(t.placed(input_placements(chosen, number)) for number, (_, t) in enumerate(named))
    here = input.mesh.get_coordinate()
    return BackwardPlan(
        operands,
        tuple(computed),
        tuple(wanted),
        None if here is None else _localize(chosen, conv, operands[1], weight, gradient.shape),
    )


def _results(conv: Convolution, input: Layout, weight: Layout) -> tuple[Layout, ...]:
    """The gradients of input, weight and bias, dense, and placed as these are (the bias as it goes with the weight)."""
    sharded = (Shard(1),) if conv.transposed and conv.groups == 1 else (Shard(0),)
    bias: tuple[Placement, ...] = tuple(Shard(0) if p in sharded else Replicate() for p in weight.placements)
    channels = conv.output_channels(weight.shape)
    return input.dense, weight.dense, Layout(weight.mesh, bias, (channels,), (1,), weight.dtype)


def _fits(conv: Convolution, input: Layout, weight: Layout) -> Callable[[Assignment], bool]:
    """No rank has parts of a group, and a batch of fewer samples than ranks is not sharded anew: some would be idle."""

    def idles(mesh_dim: int, row: Row) -> bool:
        anew = row.name == "batch" and input.placements[mesh_dim] != Shard(0)
        return anew and input.shape[0] < input.mesh.size(mesh_dim)

    def fits(assignment: Assignment) -> bool:
        full_groups = local_groups(assignment, conv, input.mesh, weight.shape) is not None
        return full_groups and not any(idles(*entry) for entry in enumerate(assignment))

    return fits


def _localize(
    chosen: Assignment, conv: Convolution, input: Layout, weight: Layout, output_shape: Sequence[int]
) -> LocalConvolution:
    """This rank's tile of a convolution, of an input with the layout that the chosen rows ask for."""
    windows = conv.windows(weight.shape[2:])
    fine, coarse = (output_shape, input.shape) if conv.transposed else (input.shape, output_shape)
    here = replace(conv, groups=_groups_here(chosen, conv, input, weight))
    tiling = ConvolutionTiling.of(input, fine, coarse, dict(enumerate(windows, 2)))
    return LocalConvolution(here, windows, tuple(fine[2:]), tuple(coarse[2:]), tiling)


def _groups_here(chosen: Assignment, conv: Convolution, input: Layout, weight: Layout) -> int:
    groups = local_groups(chosen, conv, input.mesh, weight.shape)
    assert groups is not None, "a chosen assignment fits"
    place = 0
    for mesh_dim, row in enumerate(chosen):
        if row.name == "groups":
            place = place * input.mesh.size(mesh_dim) + input.mesh.get_local_rank(mesh_dim)
    return groups[place]
