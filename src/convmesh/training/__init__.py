"""The way of a training script: a model on a mesh, its data in regions, its gradients summed."""

from .distribute import distribute as distribute
from .distribute import no_sync as no_sync
from .loader import Loader as Loader
from .loader import loader as loader
from .region import from_region as from_region
from .region import region as region
from .region import shard as shard
