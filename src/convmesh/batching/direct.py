"""All samples by a kernel of our own: operands are read as they lie, and nothing but the result is written.

For CPUs. What is plain to it is which numbers a product reads; so it has no layouts to go through, and small
convolutions cost no more than their arithmetic.
"""

from __future__ import annotations

from math import prod

from torch import Tensor

from .. import kernels
from ._functorch import Nature
from .algorithms import Algorithm, Task, spread
from .contraction import Contraction, Role
from .folding import Mapped, Operand
from .memory import contiguous, new_empty
from .patches import WORKSPACE_LIMIT

# So few columns that rows are made into vectors instead, where these are long enough: half a vector, both at most.
FEW = 8
# Bytes that one image may be transformed into.
NUMBERS_LIMIT = 16 * 2**20


class Direct(Algorithm):
    name = "direct"
    keeps_memory = True
    reads_as_laid = True

    def applies(self, task: Task) -> bool:
        plain = task.nature is Nature.PLAIN and task.device == "cpu" and task.dtype in ("float32", "float64")
        fits = any(task.mapped) and not task.is_empty and len(task.contraction.image) <= 5
        return plain and fits and self.workspace(task) <= WORKSPACE_LIMIT and task.machine.has_kernels()

    def workspace(self, task: Task) -> int:
        """For each thread an image with what is around it, and columns of the other operand, packed."""
        product = task.contraction
        sizes = zip(product.image[2:], product.geometry.padding, product.kernel[2:], strict=True)
        image = prod(size + 2 * padding + taps for size, padding, taps in sizes)
        channels = max(product.image[1], product.response[1]) // product.geometry.groups
        columns = max(prod(product.response[2:]), prod(product.kernel[1:]))
        return task.threads * task.itemsize * (image * channels + 16 * columns)

    def traffic(self, task: Task) -> int:
        return 0

    def multiplications(self, task: Task) -> float:
        """Columns of a product are channels of the result, and fill vectors; or its rows do."""
        product = task.contraction
        columns, lanes = _columns(product), kernels.lanes(task.itemsize)
        stride, depthwise = product.geometry.stride[-1], product.kernel[1] == 1 and columns == 1
        if product.wanted is Role.IMAGE:
            across = product.image[-1] // stride
        else:
            across = product.response[-1] if stride == 1 else 1  # else what is read does not lie side by side
        by_rows = columns <= min(FEW, lanes // 2) and across >= lanes // 2 and not depthwise
        side_by_side = across if by_rows else product.geometry.groups if depthwise else columns
        return task.batch * product.multiplications * _filling(side_by_side, lanes)

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        wanted = task.contraction.wanted
        result = new_empty(first.value, (task.batch, *task.contraction.shape(wanted)))
        tensors = {each.role: _readable(each, task.batch) for each in (first, second)} | {wanted: result}
        biases = None if bias is None else contiguous(spread(bias, task.batch).value)
        steps = kernels.Steps(tensors[Role.IMAGE], tensors[Role.KERNEL], tensors[Role.RESPONSE], biases)
        if not second.is_mapped and second.role is Role.KERNEL and (bias is None or bias.dim is None):
            steps = _as_one_sample(steps)
        product = kernels.Product(wanted.name.lower(), len(steps.image), task.contraction.geometry, self.name)
        kernels.compute(product, steps, task.threads)
        return Mapped(result, 0)


class Winograd(Direct):
    """With fewer multiplications, for 3 x 3 taps that take no steps; a third dimension in front may have any taps.

    Rounding is that of numbers of about twice the size.
    """

    name = "winograd"

    def applies(self, task: Task) -> bool:
        return _is_winograds(task) and super().applies(task) and self._numbers(task) <= NUMBERS_LIMIT

    def _numbers(self, task: Task) -> int:
        """Bytes of what one image is transformed into."""
        product = task.contraction
        channels = max(product.image[1], product.response[1]) // product.geometry.groups
        *depth, h, w = (max(sizes) for sizes in zip(product.image[2:], product.response[2:], strict=True))
        return task.itemsize * channels * (prod(depth) + 2) * (h + 2) * (w + 2) * 4

    def workspace(self, task: Task) -> int:
        product = task.contraction
        columns = 16 * 32 * max(prod(product.response[2:]), prod(product.kernel[1:]))
        sums = 16 * product.kernel[0] * product.kernel[1] * prod(product.kernel[2:-2])
        return task.threads * (2 * self._numbers(task) + task.itemsize * (columns + sums))

    def multiplications(self, task: Task) -> float:
        """Sixteen for a tile of two by two results."""
        *depth, h, w = task.contraction.response[2:]
        if task.contraction.wanted is Role.IMAGE:
            *depth, h, w = task.contraction.image[2:]
        outputs, inputs, *taps = task.contraction.kernel
        planes = task.batch * task.contraction.image[0] * prod(depth) * prod(taps[:-2])
        tiles = planes * ((h + 1) // 2) * ((w + 1) // 2)
        return 16 * tiles * outputs * inputs * _filling(_columns(task.contraction), kernels.lanes(task.itemsize))


def _columns(product: Contraction) -> int:
    """Channels of the result, of one group."""
    outputs, inputs, *_ = product.kernel
    return inputs if product.wanted is Role.IMAGE else outputs // product.geometry.groups


def _filling(numbers: int, lanes: int) -> float:
    """By how much vectors are longer than the numbers side by side in them."""
    return -(-numbers // lanes) * lanes / numbers


def _is_winograds(task: Task) -> bool:
    product, geometry = task.contraction, task.contraction.geometry
    taps = product.kernel[2:]
    return (
        len(taps) > 1
        and taps[-2:] == (3, 3)
        and {*geometry.stride, *geometry.dilation} == {1}
        and all(padding < size for padding, size in zip(geometry.padding, taps, strict=True))
    )


def _as_one_sample(steps: kernels.Steps) -> kernels.Steps:
    """[B N ...] -> [1 (B N) ...], where kernels are the same and images lie evenly: they are read once for all then."""
    image, kernel, response, bias = steps
    even = all(each.shape[1] == 1 or each.stride(0) == each.shape[1] * each.stride(1) for each in (image, response))
    if not even:
        return steps
    images, responses = (each.flatten(0, 1).unsqueeze(0) for each in (image, response))
    return kernels.Steps(images, kernel[:1], responses, None if bias is None else bias[:1])


def _readable(operand: Operand, batch: int) -> Tensor:
    """[B ...], as it lies if numbers follow each other along the dimensions that are read in one go."""
    value, outer = (operand.in_front(), 1) if operand.is_mapped else (operand.value, 0)
    outer += 1 if operand.role is Role.KERNEL else 2
    inner = value[(0,) * outer]
    value = value if inner.is_contiguous() else contiguous(value)
    return value if operand.is_mapped else value.expand(batch, *value.shape)
