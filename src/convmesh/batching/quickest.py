"""The fastest algorithm on CPUs, by a list of cases, the first of which that fits decides.

The list was made from times of layers that are not in the benchmarks, for all products and all combinations of mapped
operands, with vectors of 512 and 256 bits. `enable(benchmark=True)` measures instead.
"""

from __future__ import annotations

from math import prod

from .algorithms import Task
from .contraction import Role

# Channels of which transforms cost more than what they save. A kernel's gradient does with fewer, the more so in 3-d,
# where transforms of planes are for all taps of the depth; but what it has of both, multiplied, is more than the last.
FEW_CHANNELS, FEW_OF_KERNELS, SMALL_KERNELS = 8, 4, 64
# So few places, of all images of a sample: transforms of a kernel's gradient cost more than what they save.
FEW_PLACES = 48


def quickest(task: Task, fold: str, winograd: bool) -> tuple[str, str]:
    """Return the name of the algorithm, and the reason; `winograd` says whether Winograd's algorithm applies."""
    product, wanted = task.contraction, task.contraction.wanted
    (outputs, c, *taps), groups = product.kernel, product.geometry.groups
    if task.is_empty or task.batch == 1:
        return fold, "there is nothing to gain"
    # Kernels over one activation are computed as one: it is transformed once for all of them.
    several = 1 if task.mapped[0] else task.batch
    read, made = (outputs // groups, c * several) if wanted is Role.IMAGE else (c, outputs // groups * several)
    is_large = min(read, made) > FEW_CHANNELS
    if wanted is Role.KERNEL:
        is_wide = min(read, made) > FEW_OF_KERNELS and (len(taps) == 3 or read * made > SMALL_KERNELS)
        is_large = is_wide and product.image[0] * prod(product.response[2:]) >= FEW_PLACES
    if winograd and is_large:
        return "winograd", "3 x 3 taps that take no steps: fewer multiplications"
    return "direct", "operands are read as they lie, and nothing but the result is written"
