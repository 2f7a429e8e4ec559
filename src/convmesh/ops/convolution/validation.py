"""What a convolution asks of its arguments. Every rank sees the same shapes, so every rank raises alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...geometry import Convolution
from ...sharding.errors import ShardingError, refuse
from ...sharding.layout import Layout

Named = Sequence[tuple[str, Any]]


def check_shapes(
    operator: str, tensors: Named, conv: Convolution, input: Layout, weight: Layout, bias: Layout | None
) -> None:
    """The sizes fit together and give an output."""

    def wrong(reason: str, remedy: str) -> ShardingError:
        return refuse(operator, reason, [*tensors, ("geometry", conv)], remedy)

    spatial = len(weight.shape) - 2
    if spatial not in (1, 2, 3) or len(input.shape) != len(weight.shape):
        raise wrong(f"a weight of {len(weight.shape)} dimensions needs an input of as many, 3 to 5",
                    "give input (N, C, *space) and weight (out, in / groups, *kernel)")  # fmt: skip
    lists = (conv.stride, conv.padding, conv.dilation, conv.output_padding)
    if any(len(values) != spatial for values in lists):
        raise wrong(
            f"stride, padding, dilation and output_padding take one number, or {spatial}", "give as many numbers"
        )
    if min((*conv.stride, *conv.dilation), default=1) < 1 or min((*conv.padding, *conv.output_padding), default=0) < 0:
        raise wrong("strides and dilations must be positive, paddings not negative", "pad with F.pad to crop")
    _check_channels(conv, input, weight, bias, wrong)
    if len({layout.dtype for layout in (input, weight, bias) if layout is not None}) > 1:
        raise wrong("the dtypes differ", "cast them to one dtype, or run under torch.autocast")
    if not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise wrong(f"convolutions of dtype {input.dtype} are not supported", "cast to a floating point dtype")
    if conv.transposed:
        limits = zip(conv.output_padding, conv.stride, conv.dilation, strict=True)
        if any(extra >= max(stride, dilation) for extra, stride, dilation in limits):
            raise wrong("output_padding must be smaller than stride or dilation", "make it smaller")
    sizes = conv.output_size(input.shape[2:], weight.shape[2:])
    if min(sizes) <= 0 or min(weight.shape[2:]) <= 0:
        raise wrong(f"the output's size {sizes} is too small", "use a larger input, more padding or a smaller kernel")


def _check_channels(conv: Convolution, input: Layout, weight: Layout, bias: Layout | None, wrong: Any) -> None:
    if conv.groups < 1 or weight.shape[0] % conv.groups:
        raise wrong(f"`groups` (={conv.groups}) must divide the weight's first size (={weight.shape[0]})",
                    "choose channels that are multiples of groups")  # fmt: skip
    if not all((*weight.shape[:2], input.shape[1])):
        raise wrong("there are no channels", "leave the convolution out, or give it at least one of both channels")
    expected = conv.input_channels(weight.shape)
    if input.shape[1] != expected:
        raise wrong(f"the input has {input.shape[1]} channels, and the weight takes {expected}",
                    "give the input as many channels as the weight takes")  # fmt: skip
    channels = conv.output_channels(weight.shape)
    if bias is not None and bias.shape != (channels,):
        raise wrong(
            f"the bias has shape {bias.shape}, and the output {channels} channels", f"give it shape ({channels},)"
        )


def check_gradient(
    operator: str, tensors: Named, conv: Convolution, gradient: Layout, input: Layout, weight: Layout
) -> None:
    sizes = conv.output_size(input.shape[2:], weight.shape[2:])
    shape = (input.shape[0], conv.output_channels(weight.shape), *sizes)
    if gradient.shape != shape:
        raise refuse(operator, f"the output has shape {shape}, and its gradient {gradient.shape}", tensors,
                     "give a gradient of the output's shape")  # fmt: skip
    if gradient.dtype != input.dtype:
        raise refuse(operator, "the dtypes differ", tensors, "cast the gradient to the input's dtype")
