"""Which algorithm is the quickest on CPUs: a list of cases, of which the first that fits counts.

It was made from the times of 63 layers, none of which the benchmarks have, for all products and ways of mapping them,
with one and two threads and vectors of 512 and of 256 bits. By this list they take 5 % longer than if the quickest were
always taken, and 1.3 to 2 times less than if all were left to torch. `enable(benchmark=True)` measures instead.

What it says of float64 and of volumes is from ten layers more, with vectors of 512 bits.
"""

from __future__ import annotations

from math import prod

from .algorithms import Task
from .contraction import Role

# Channels of which transforms cost more than what they save, and of which a library does well to have more.
FEW_CHANNELS = 8
FEW_CHANNELS_OF_VOLUMES = 16
# So few places, of all images of a sample: transforms of a kernel's gradient cost more than what they save.
FEW_PLACES = 48


def quickest(task: Task, fold: str, winograd: bool) -> tuple[str, str]:
    """The name of the algorithm, and why; `winograd` says whether that applies."""
    product, geometry = task.contraction, task.contraction.geometry
    (outputs, c, *taps), wanted, groups = product.kernel, product.wanted, geometry.groups
    o, places = outputs // groups, product.image[0] * prod(product.response[2:])
    # Of a forward product or an input's gradient: the activation that it reads, and the kernel.
    activation, kernel = task.mapped if wanted is not Role.KERNEL else (None, None)
    if task.is_empty or task.batch == 1:
        return fold, "there is nothing to gain"
    if task.dtype == "float64":
        return "direct", "a library has code for float32 alone"
    if groups > 1 and o == c == 1 and activation:
        return fold, "depthwise, for which a library has code of its own"
    few = FEW_CHANNELS if len(taps) < 3 else FEW_CHANNELS_OF_VOLUMES
    if groups == 1 and kernel and not activation and min(c, o if wanted is Role.RESPONSE else c) <= few:
        return fold, "few channels, which many kernels over one activation fill up"
    # Transforms of planes are for all taps of the depth: there they save more of a kernel's gradient.
    enough = 5 if wanted is Role.KERNEL and len(taps) == 3 else FEW_CHANNELS + 1
    if winograd and min(o, c) >= enough and not (wanted is Role.KERNEL and places < FEW_PLACES):
        return "winograd", "3 x 3 taps that take no steps: fewer multiplications"
    kernels, activations = task.batch * prod(product.kernel), prod(product.image) + task.batch * prod(product.response)
    if groups == 1 and wanted is Role.RESPONSE and kernel and not activation and kernels < activations:
        return fold, "kernels that are smaller than the activation they share"
    spread_out = wanted is Role.IMAGE and max(geometry.stride) > 1
    if groups == 1 and activation and not kernel and prod(taps) == 1 and not spread_out:
        return fold, "one tap, the same for all samples: one large product of matrices"
    return "direct", "operands are read as they lie, and nothing but the result is written"
