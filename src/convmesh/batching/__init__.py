"""vmap over convolutions: the rules, the choice of an algorithm, and gradients per sample."""

from convmesh.batching.calibration import calibrate as calibrate
from convmesh.batching.choice import Decision as Decision
from convmesh.batching.choice import explain as explain
from convmesh.batching.choice import force as force
from convmesh.batching.per_sample import clipped_gradient as clipped_gradient
from convmesh.batching.per_sample import per_sample_gradients as per_sample_gradients
from convmesh.batching.per_sample import per_sample_norms as per_sample_norms
from convmesh.batching.registration import install as install
from convmesh.batching.registration import installed as installed
from convmesh.batching.registration import uninstall as uninstall
