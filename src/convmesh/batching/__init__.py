"""vmap over convolutions: the rules, the choice of an algorithm, and gradients per sample."""

from convmesh.batching.choice import explain as explain
from convmesh.batching.choice import force as force
from convmesh.batching.registration import install as install
from convmesh.batching.registration import installed as installed
from convmesh.batching.registration import uninstall as uninstall
