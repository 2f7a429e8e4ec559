"""Which algorithm is the quickest on CPUs: a list of cases, of which the first that fits counts.

It was made from the times of 47 layers, none of which the benchmarks have, for all products and ways of mapping them,
with one and two threads and vectors of 512 and of 256 bits. By this list they take TIME % longer than by always taking
the quickest. `enable(benchmark=True)` measures instead.
"""

from __future__ import annotations

from math import prod

from .algorithms import Task
from .contraction import Role

# Channels that libraries lay side by side.
BLOCK = 8
# So few places, of all images of a sample: transforms take longer than what they save.
FEW_PLACES = 48


def quickest(task: Task, fold: str, winograd: bool) -> tuple[str, str]:
    """The name of the algorithm, and why; `winograd` says whether that applies."""
    product, geometry = task.contraction, task.contraction.geometry
    (outputs, c, *taps), wanted, groups = product.kernel, product.wanted, geometry.groups
    o = outputs // groups
    activation_mapped, kernel_mapped = task.mapped if wanted is not Role.KERNEL else (False, False)
    if task.is_empty or task.batch == 1:
        return fold, "there is nothing to gain"
    # A library has code for depthwise layers, which does well unless kernels alone are mapped.
    if groups > 1 and o == c == 1:
        return (fold, "depthwise") if activation_mapped else ("direct", "depthwise, of a kernel or with mapped kernels")
    if groups > 1 and o == c == BLOCK:
        return fold, "groups fill the library's blocks"
    if winograd and min(o, c) >= BLOCK and not (wanted is Role.KERNEL and _places(task) < FEW_PLACES):
        return "winograd", "3 x 3 taps that take no steps: fewer multiplications"
    # One kernel for all samples makes one large matrix product of them, unless a gradient has to be spread out.
    alone = groups == 1 and (activation_mapped, kernel_mapped)
    if alone == (True, False) and prod(taps) == 1 and (wanted is Role.RESPONSE or max(geometry.stride) == 1):
        return fold, "one tap, the same for all samples"
    # Many kernels over one activation: folded, they fill up the few channels that a layer has.
    if alone == (False, True) and min(c, o if wanted is Role.RESPONSE else c) < BLOCK:
        return fold, "few channels, and an activation that is the same for all samples"
    return "direct", "operands are read as they lie, and nothing but the result is written"


def _places(task: Task) -> int:
    return task.contraction.image[0] * prod(task.contraction.response[2:])
