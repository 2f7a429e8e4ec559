"""Which products a mapped operator asks for, from how its operands lie: integers, made once for every kind of call."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import Convolution, Shape
from ._functorch import Nature, nature_of
from .algorithms import Machine, Task
from .contraction import FACTORS, Contraction, Role
from .folding import Mapped, Operand

# Stride, padding, dilation, transposed, output padding and groups, as an operator gets them.
Arguments = tuple[Shape, Shape, Shape, bool, Shape, int]


class Laid(NamedTuple):
    """How an operand lies in memory, and which of its dimensions is mapped."""

    shape: Shape
    stride: Shape
    dim: int | None

    @property
    def sample(self) -> Shape:
        shape = tuple(self.shape)
        return shape if self.dim is None else shape[: self.dim] + shape[self.dim + 1 :]

    def lies_folded(self, role: Role) -> bool:
        """Whether it is an activation in memory as [N B ...]: folds take that as it is, and all others copy it."""
        if self.dim is None or role is Role.KERNEL or self.sample[0] == 1:
            return False
        return self.stride[self.dim] < self.stride[1 if self.dim == 0 else 0]


class Circumstances(NamedTuple):
    """What a choice depends on beside shapes."""

    nature: Nature
    dtype: torch.dtype
    device: torch.device
    threads: int
    machine: Machine


def circumstances_of(nature: Nature, value: Tensor, machine: Machine) -> Circumstances:
    return Circumstances(nature, value.dtype, value.device, torch.get_num_threads(), machine)


def laid(mapped: Mapped) -> Laid:
    return Laid(mapped.value.shape, mapped.value.stride(), mapped.dim)


def forward_task(x: Laid, w: Laid, b: Laid | None, arguments: Arguments, around: Circumstances) -> Task:
    """The product that a forward operator computes; a RuntimeError where shapes do not fit."""
    geometry = Convolution.of(len(w.sample) - 2, *arguments)
    output = _output_shape(x, w, b, geometry)
    shapes = (output, w.sample, x.sample) if geometry.transposed else (x.sample, w.sample, output)
    contraction = Contraction(Role.IMAGE if geometry.transposed else Role.RESPONSE, geometry, *shapes)
    return _task(contraction, _batch_size(x, w, b), (x, w), around)


def backward_tasks(
    g: Laid, x: Laid, w: Laid, arguments: Arguments, around: Circumstances, both: bool
) -> tuple[Task, Task]:
    """The products that are the gradients of the input and of the weight; `both` are asked for, or one of them."""
    geometry = Convolution.of(len(w.sample) - 2, *arguments)
    output = _output_shape(x, w, None, geometry)
    if g.sample != output:
        complaint = f"`grad_output` has the shape {list(g.sample)}, but the output is {list(output)}"
        raise RuntimeError(f"{complaint} ({_mapped_dimensions(grad_output=g, input=x, weight=w)})")
    image, response = (g, x) if geometry.transposed else (x, g)
    shapes, batch = (image.sample, w.sample, response.sample), _batch_size(g, x, w)
    of_input = Contraction(Role.RESPONSE if geometry.transposed else Role.IMAGE, geometry, *shapes)
    of_weight = Contraction(Role.KERNEL, geometry, *shapes)
    shared = None if not both else Role.IMAGE if geometry.transposed else Role.RESPONSE
    return (
        _task(of_input, batch, (g, w), around, shared),
        _task(of_weight, batch, (image, response), around, shared),
    )


# Of plain tensors: all sizes are integers then, and a call is much like the one before.
known_forward_task = lru_cache(maxsize=4096)(forward_task)
known_backward_tasks = lru_cache(maxsize=4096)(backward_tasks)


def task_of(contraction: Contraction, batch: int, first: Operand, second: Operand, machine: Machine) -> Task:
    """Of operands that are not DTensors."""
    around = circumstances_of(nature_of(first.value, second.value), first.value, machine)
    return _task(contraction, batch, (laid(first.mapped), laid(second.mapped)), around)


def _task(
    contraction: Contraction,
    batch: int,
    factors: tuple[Laid, Laid],
    around: Circumstances,
    shared: Role | None = None,
) -> Task:
    roles = FACTORS[contraction.wanted]
    return Task(
        contraction,
        batch,
        (factors[0].dim is not None, factors[1].dim is not None),
        around.nature,
        str(around.dtype).removeprefix("torch."),
        around.dtype.itemsize,
        around.device.type,
        around.threads,
        around.machine,
        around.nature is Nature.PLAIN and any(map(Laid.lies_folded, factors, roles)),
        shared,
    )


def _batch_size(*operands: Laid | None) -> int:
    return next(each.shape[each.dim] for each in operands if each is not None and each.dim is not None)


def _output_shape(x: Laid, w: Laid, b: Laid | None, geometry: Convolution) -> Shape:
    """The shape of one sample's output; what does not fit gets torch's own words for that sample."""
    image, kernel = x.sample, w.sample
    if len(image) == len(kernel) == len(geometry.stride) + 2:
        inside = kernel[1] * geometry.groups
        inputs, outputs = (kernel[0], inside) if geometry.transposed else (inside, kernel[0])
        size = geometry.output_size(image[2:], kernel[2:])
        channels_fit = image[1] == inputs and kernel[0] % geometry.groups == 0
        if channels_fit and (b is None or b.sample == (outputs,)) and all(n > 0 for n in size):
            return (image[0], outputs, *size)
    raise RuntimeError(f"{_complaint(x, w, b, geometry)} ({_mapped_dimensions(input=x, weight=w, bias=b)})")


def _complaint(x: Laid, w: Laid, b: Laid | None, geometry: Convolution) -> str:
    """What torch says when it is given one sample."""
    one_x, one_w, one_b = (None if each is None else torch.empty(each.sample) for each in (x, w, b))
    try:
        torch.ops.aten.convolution.default(one_x, one_w, one_b, *geometry.arguments)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error)
    return f"no rule fits a convolution of {list(x.sample)} with {list(w.sample)} and {geometry}"


def _mapped_dimensions(**operands: Laid | None) -> str:
    mapped = [
        f"dimension {each.dim} of `{name}`"
        for name, each in operands.items()
        if each is not None and each.dim is not None
    ]
    return f"for each of {_batch_size(*operands.values())} samples: vmap maps {', '.join(mapped)}"
