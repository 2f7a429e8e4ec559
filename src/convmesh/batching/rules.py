"""The batching rules of convolution: what each mapped operand does to a result.

In the comments B is the mapped dimension, `*` the spatial ones; a transposed convolution has the weight [C O/g *].
Where B ends up in memory is up to the algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..geometry import Convolution, Shape
from ._functorch import Nature, below_vmap, current_level, nature_of, unwrap, wrap
from .algorithms import Task, add_bias
from .choice import choose
from .contraction import Contraction, Role
from .folding import Mapped, Operand
from .sharded import by_own_samples, expressible, without_filling


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """`aten.convolution` under vmap."""
    geometry = Convolution.of(weight.ndim - 2, stride, padding, dilation, transposed, output_padding, groups)
    level = current_level()
    x, w = Mapped(*unwrap(input, level)), Mapped(*unwrap(weight, level))
    b = None if bias is None else Mapped(*unwrap(bias, level))
    nature = nature_of(x.value, w.value, *([] if b is None else [b.value]))
    with below_vmap(nature):
        return wrap(*_forward(x, w, b, geometry, nature), level)


def _forward(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution, nature: Nature) -> Mapped:
    batch = _batch_size(x, w, b)
    output = _output_shape(x, w, b, geometry)
    if geometry.transposed:
        wanted, product = Role.IMAGE, partial(Contraction, image=output, response=x.sample_shape)
        first = Operand(Role.RESPONSE, x)
    else:
        wanted, product = Role.RESPONSE, partial(Contraction, image=x.sample_shape, response=output)
        first = Operand(Role.IMAGE, x)
    contraction = product(wanted=wanted, geometry=geometry, kernel=w.sample_shape)
    # [B N C *] [O C *]   [O] or [B O] -> [B N O *]
    # [N C *]   [B O C *] [O] or [B O] -> [B N O *]
    # [B N C *] [B O C *] [O] or [B O] -> [B N O *]
    if x.dim is not None or w.dim is not None:
        return _contract(contraction, batch, nature, first, Operand(Role.KERNEL, w), b)
    # [N C *]   [O C *]   [B O]        -> [B N O *]
    assert b is not None
    return add_bias(Mapped(contraction(x.value, w.value), None), b)


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward` under vmap."""
    geometry = Convolution.of(weight.ndim - 2, stride, padding, dilation, transposed, output_padding, groups)
    level = current_level()
    g, x, w = (Mapped(*unwrap(tensor, level)) for tensor in (grad_output, input, weight))
    nature = nature_of(g.value, x.value, w.value)
    with below_vmap(nature):
        gradients = _backward(g, x, w, geometry, nature, output_mask)
        return tuple(None if each is None else wrap(*each, level) for each in gradients)  # type: ignore[return-value]


def _backward(
    g: Mapped, x: Mapped, w: Mapped, geometry: Convolution, nature: Nature, output_mask: Sequence[bool]
) -> tuple[Mapped | None, Mapped | None, Mapped | None]:
    batch = _batch_size(g, x, w)
    output = _output_shape(x, w, None, geometry)
    if g.sample_shape != output:
        complaint = f"`grad_output` has the shape {list(g.sample_shape)}, but the output is {list(output)}"
        raise RuntimeError(f"{complaint} ({_mapped_dimensions(grad_output=g, input=x, weight=w)})")
    image, response = (g, x) if geometry.transposed else (x, g)
    product = partial(
        Contraction,
        geometry=geometry,
        image=image.sample_shape,
        kernel=w.sample_shape,
        response=response.sample_shape,
    )
    taken, given = (Role.RESPONSE, Role.IMAGE) if geometry.transposed else (Role.IMAGE, Role.RESPONSE)
    g_operand, x_operand, w_operand = Operand(given, g), Operand(taken, x), Operand(Role.KERNEL, w)
    grad_input = grad_weight = grad_bias = None
    # [B N O *] [O C *]   -> [B N C *]
    # [N O *]   [B O C *] -> [B N C *]
    # [B N O *] [B O C *] -> [B N C *]
    if output_mask[0]:
        grad_input = _contract(product(wanted=taken), batch, nature, g_operand, w_operand, None)
    # [N C *]   [B N O *] -> [B O C *]
    # [B N C *] [N O *]   -> [B O C *]
    # [B N C *] [B N O *] -> [B O C *]     gradients per sample
    if output_mask[1]:
        pair = (g_operand, x_operand) if geometry.transposed else (x_operand, g_operand)
        grad_weight = _contract(product(wanted=Role.KERNEL), batch, nature, *pair, None)
    # [B N O *]           -> [B O]
    if output_mask[2]:
        grad_bias = _sum_to_channels(g)
    return grad_input, grad_weight, grad_bias


def _contract(
    contraction: Contraction, batch: int, nature: Nature, first: Operand, second: Operand, bias: Mapped | None
) -> Mapped:
    """By the algorithm that suits. Gradients of what is not mapped depend on no sample, and are computed once."""
    if not first.is_mapped and not second.is_mapped:
        return Mapped(contraction(first.value, second.value), None)
    if nature is Nature.SHARDED:
        result = by_own_samples(contraction, batch, first, second, bias, _compute)
        if result is not None:
            return result
    if batch == 0:
        return _nothing(contraction, first, second)
    if nature in (Nature.SHARDED, Nature.OPAQUE):
        samples, first, second, bias = expressible(contraction, batch, first, second, bias)
        return without_filling(_run(contraction, samples, Nature.OPAQUE, first, second, bias), batch)
    return _run(contraction, batch, nature, first, second, bias)


def _compute(contraction: Contraction, batch: int, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
    """Of tensors that are not DTensors."""
    return _contract(contraction, batch, nature_of(first.value, second.value), first, second, bias)


def _run(
    contraction: Contraction, batch: int, nature: Nature, first: Operand, second: Operand, bias: Mapped | None
) -> Mapped:
    value = first.value
    task = Task(
        contraction,
        batch,
        (first.is_mapped, second.is_mapped),
        nature,
        str(value.dtype).removeprefix("torch."),
        value.element_size(),
        value.device.type,
        torch.get_num_threads(),
        nature is Nature.PLAIN and (first.lies_folded or second.lies_folded),
    )
    return choose(task, first, second, bias).run(task, first, second, bias)


def _nothing(contraction: Contraction, first: Operand, second: Operand) -> Mapped:
    """The result for no samples at all: empty, and yet a function of its operands."""
    empty = first.value.new_empty((0, *contraction.shape(contraction.wanted)))
    return Mapped(empty * (first.value.sum() * second.value.sum()), 0)


def _sum_to_channels(g: Mapped) -> Mapped:
    if g.dim is None:
        return Mapped(g.value.sum((0, *range(2, g.value.ndim))), None)
    return Mapped(g.in_front.sum((1, *range(3, g.value.ndim))), 0)


def _batch_size(*operands: Mapped | None) -> int:
    return next(each.value.shape[each.dim] for each in operands if each is not None and each.dim is not None)


def _output_shape(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution) -> Shape:
    """The shape of one sample's output; what does not fit gets torch's own words for that sample."""
    image, kernel = x.sample_shape, w.sample_shape
    if len(image) == len(kernel) == len(geometry.stride) + 2:
        inside = kernel[1] * geometry.groups
        inputs, outputs = (kernel[0], inside) if geometry.transposed else (inside, kernel[0])
        size = geometry.output_size(image[2:], kernel[2:])
        channels_fit = image[1] == inputs and kernel[0] % geometry.groups == 0
        if channels_fit and (b is None or b.sample_shape == (outputs,)) and all(n > 0 for n in size):
            return (image[0], outputs, *size)
    raise RuntimeError(f"{_complaint(x, w, b, geometry)} ({_mapped_dimensions(input=x, weight=w, bias=b)})")


def _complaint(x: Mapped, w: Mapped, b: Mapped | None, geometry: Convolution) -> str:
    """What torch says when it is given one sample."""
    one_x, one_w, one_b = (None if each is None else torch.empty(each.sample_shape) for each in (x, w, b))
    try:
        torch.ops.aten.convolution.default(one_x, one_w, one_b, *geometry.arguments)
    except (RuntimeError, IndexError, ValueError) as error:
        return str(error)
    return f"no rule fits a convolution of {list(x.sample_shape)} with {list(w.sample_shape)} and {geometry}"


def _mapped_dimensions(**operands: Mapped | None) -> str:
    mapped = [
        f"dimension {each.dim} of `{name}`"
        for name, each in operands.items()
        if each is not None and each.dim is not None
    ]
    return f"for each of {_batch_size(*operands.values())} samples: vmap maps {', '.join(mapped)}"
