"""Computations on local tensors: torch's operators, and faster implementations for some devices (`backend.py`).

For CPUs some are in C++, compiled on the machine when first needed: vmapped convolutions (libraries for neural networks
are made for a few large convolutions; for many small ones they reorder or concatenate the operands, or synchronize
between them), and the passes over memory that a norm needs.
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
