"""What torch's operators do not do fast on CPUs, in C++: compiled on the machine that it runs on, when first needed.

Convolutions of many samples at once: libraries for neural networks are made for few large ones, and lay out the
operands of small ones anew, copy them together, or wait between them. And the passes over memory that a norm needs.
"""

from .library import available as available
from .library import combined as combined
from .library import compute as compute
from .library import lanes as lanes
from .library import moments as moments
from .library import sums as sums
from .library import takes as takes
from .norms import Linear as Linear
from .products import Product as Product
from .products import Steps as Steps
