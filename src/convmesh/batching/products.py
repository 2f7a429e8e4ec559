"""Which products a vmapped operator needs, computed from shapes and strides alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Convolution, Shape
from . import choice
from ._functorch import Nature, is_watched, nature_of
from .algorithms import Machine, Task
from .contraction import FACTORS, Contraction, Role
from .folding import Mapped, Operand
from .machines import OWN, of_plain_tensors

# Stride, padding, dilation, transposed, output padding and groups, as an operator gets them.
Arguments = tuple[Shape, Shape, Shape, bool, Shape, int]


class OddError(Exception):
    """torch accepts the call, but the result is not that of a convolution, for example without channels."""


class Circumstances(NamedTuple):
    """What a choice depends on besides shapes."""

    nature: Nature
    dtype: torch.dtype
    device: torch.device
    threads: int
    machine: Machine
    exact: bool


def circumstances_of(nature: Nature, value: Tensor, machine: Machine | None = None) -> Circumstances:
    by = machine or of_plain_tensors()
    # What watches operators does not see kernels of our own. But ranks that are not alone choose alike, watched or not.
    if nature is Nature.PLAIN and by is OWN and is_watched():
        nature = Nature.TRACED
    return Circumstances(nature, value.dtype, value.device, torch.get_num_threads(), by, choice.settings().is_exact)


def forward_task(x: Mapped, w: Mapped, b: Mapped | None, arguments: Arguments, around: Circumstances) -> Task:
    """Return the product that a forward operator computes; raise torch's RuntimeError if shapes do not fit."""
    geometry = Convolution.of(len(w.sample_shape) - 2, *arguments)
    output = _output_shape(x, w, b, geometry)
    image, response = (output, x.sample_shape) if geometry.transposed else (x.sample_shape, output)
    wanted = Role.IMAGE if geometry.transposed else Role.RESPONSE
    contraction = Contraction(wanted, geometry, image, w.sample_shape, response)
    return _task(contraction, _batch_size(x, w, b), (x, w), around)


def backward_tasks(g: Mapped, x: Mapped, w: Mapped, arguments: Arguments, around: Circumstances) -> tuple[Task, Task]:
    """Return the products that compute the gradients of input and weight."""
    geometry = Convolution.of(len(w.sample_shape) - 2, *arguments)
    output = _output_shape(x, w, None, geometry)
    if g.sample_shape != output or not _alike(g, x):
        if g.value.numel() == 0 and _alike(g, x, w) and g.sample_shape == _by_torch(x, w, None, geometry).shape:
            raise OddError
        of_g, of_x = (f"{each.value.dtype} on {each.value.device}, of shape" for each in (g, x))
        complaint = f"`grad_output` is {of_g} {list(g.sample_shape)}, but the output is {of_x} {list(output)}"
        raise RuntimeError(f"{complaint} ({_mapped_dimensions(grad_output=g, input=x, weight=w)})")
    image, response = (g, x) if geometry.transposed else (x, g)
    shapes, batch = (image.sample_shape, w.sample_shape, response.sample_shape), _batch_size(g, x, w)
    of_input = Contraction(Role.RESPONSE if geometry.transposed else Role.IMAGE, geometry, *shapes)
    of_weight = Contraction(Role.KERNEL, geometry, *shapes)
    return _task(of_input, batch, (g, w), around), _task(of_weight, batch, (image, response), around)


def task_of(contraction: Contraction, batch: int, first: Operand, second: Operand, machine: Machine) -> Task:
    """Return the task for operands that are not DTensors."""
    around = circumstances_of(nature_of(first.value, second.value), first.value, machine)
    return _task(contraction, batch, (first.mapped, second.mapped), around)


def _task(contraction: Contraction, batch: int, factors: tuple[Mapped, Mapped], around: Circumstances) -> Task:
    nature, dtype, device, threads, machine, exact = around
    mapped = factors[0].dim is not None, factors[1].dim is not None
    name = str(dtype).removeprefix("torch.")
    folded = nature is Nature.PLAIN and any(map(_lies_folded, factors, FACTORS[contraction.wanted]))
    return Task(
        contraction, batch, mapped, nature, name, dtype.itemsize, device.type, threads, machine, exact, folded
    )  # fmt: skip


def _lies_folded(operand: Mapped, role: Role) -> bool:
    """Whether an activation is stored as `[N B ...]`, which can be folded without a copy."""
    if operand.dim is None or role is Role.KERNEL or operand.sample_shape[0] == 1:
        return False
    return operand.value.stride(operand.dim) < operand.value.stride(1 if operand.dim == 0 else 0)


def _batch_size(*operands: Mapped | None) -> int:
    return next(each.value.shape[each.dim] for each in operands if each is not None and each.dim is not None)


def _output_shape(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution) -> Shape:
    """Return the shape of one sample's output; if shapes do not fit, raise torch's error for that sample."""
    image, kernel = x.sample_shape, w.sample_shape
    if len(image) == len(kernel) == len(geometry.stride) + 2:
        inside = kernel[1] * geometry.groups
        inputs, outputs = (kernel[0], inside) if geometry.transposed else (inside, kernel[0])
        size = geometry.output_size(image[2:], kernel[2:])
        channels_fit = image[1] == inputs and kernel[0] % geometry.groups == 0
        if (
            channels_fit
            and _alike(x, w, b)
            and (b is None or b.sample_shape == (outputs,))
            and all(n > 0 for n in size)
        ):
            return (image[0], outputs, *size)
    raise RuntimeError(f"{_complaint(x, w, b, geometry)} ({_mapped_dimensions(input=x, weight=w, bias=b)})")


def _alike(*operands: Mapped | None) -> bool:
    """Check that operands have one dtype and device: compiled kernels would not notice."""
    values = [each.value for each in operands if each is not None]
    return all(each.dtype == values[0].dtype and each.device == values[0].device for each in values[1:])


def _complaint(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution) -> str:
    """Return torch's error message for one sample."""
    try:
        _by_torch(x, w, b, geometry)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error)
    raise OddError


def _by_torch(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution) -> Tensor:
    """Run torch's operator on one sample with arbitrary values."""
    one_x, one_w, one_b = (None if each is None else _one_sample(each) for each in (x, w, b))
    result: Tensor = torch.ops.aten.convolution.default(one_x, one_w, one_b, *geometry.arguments)
    return result


def _one_sample(operand: Mapped) -> Tensor:
    return torch.empty(operand.sample_shape, dtype=operand.value.dtype, device=operand.value.device)


def _mapped_dimensions(**operands: Mapped | None) -> str:
    mapped = [
        f"dimension {each.dim} of `{name}`"
        for name, each in operands.items()
        if each is not None and each.dim is not None
    ]
    return f"for each of {_batch_size(*operands.values())} samples: vmap maps {', '.join(mapped)}"
