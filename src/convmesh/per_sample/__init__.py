"""Per-sample gradients, their norms and clipped sums, by vmap or layer by layer; and norm samplers for Opacus."""

from .functions import clipped_gradient as clipped_gradient
from .functions import per_sample_gradients as per_sample_gradients
from .functions import per_sample_norms as per_sample_norms
