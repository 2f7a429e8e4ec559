"""What local tensors are computed with: torch's operators, and faster ways for a device (`backend.py`).

For CPUs some of these are in C++, which is compiled on the machine that it runs on, when first needed: convolutions of
many samples at once (libraries for neural networks are made for few large ones, and lay out the operands of small ones
anew, copy them together, or wait between them), and the passes over memory that a norm needs.
"""

from . import batch_norm_cpu as batch_norm_cpu
from . import batch_norm_fused as batch_norm_fused
from . import normalization_cpu as normalization_cpu
from .backend import COMPILED_FOR as COMPILED_FOR
from .backend import synchronous as synchronous
from .library import available as available
from .library import compute as compute
from .library import lanes as lanes
from .library import prepare as prepare
from .products import Prepared as Prepared
from .products import Product as Product
from .products import Steps as Steps
