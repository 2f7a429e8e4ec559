"""Ways for layers of many groups, for which libraries have quick code in some shapes and none in others."""

from __future__ import annotations

from ..kernels.weight_gradient import correlate
from ._functorch import Nature
from .algorithms import Algorithm, FoldGroups, Task, repeated
from .contraction import Role
from .folding import Mapped, Operand


class Repeat(FoldGroups):
    """A kernel for each sample over one activation, in groups: it is repeated, and every sample has its own groups.

    Folded into channels, the kernels of a depthwise layer have several outputs for an input: libraries have no quick
    code for that, and the activation of such a layer is not much larger than what is computed from it.
    """

    name = "repeat"
    is_torchs_own = False

    def applies(self, task: Task) -> bool:
        kernels = task.mapped == (False, True) and task.contraction.wanted is not Role.KERNEL
        return kernels and task.contraction.geometry.groups > 1 and task.may_write and not task.is_empty

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        return super().run(task, Operand(first.role, Mapped(repeated(first.mapped, task.batch), 0)), second, bias)


class Exchange(Algorithm):
    """The gradient of a depthwise kernel, as a forward convolution of the image by the response."""

    name = "exchange"

    def applies(self, task: Task) -> bool:
        product = task.contraction
        depthwise = product.kernel[0] == product.geometry.groups and product.kernel[1] == 1
        return product.wanted is Role.KERNEL and depthwise and not task.is_empty and task.nature is not Nature.OPAQUE

    def run(self, task: Task, first: Operand, second: Operand, bias: Mapped | None) -> Mapped:
        product = task.contraction
        image, response = (repeated(each.mapped, task.batch) for each in (first, second))
        taps = correlate(image.flatten(0, 2), response.flatten(0, 2), product.kernel[2:], product.geometry)
        by_image = taps.reshape(task.batch, *product.image[:2], 1, *product.kernel[2:])
        return Mapped(by_image.sum(1), 0)
