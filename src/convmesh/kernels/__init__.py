"""Convolutions of many samples at once, in C++, for CPUs: compiled on the machine that they run on, when first needed.

Libraries for neural networks are made for few large convolutions. A batch of gradients, or of models, is many small
ones, and between them libraries lay their operands out anew, copy them together, or wait.
"""

from .products import WANTED as WANTED
from .products import Steps as Steps
from .products import available as available
from .products import compute as compute
