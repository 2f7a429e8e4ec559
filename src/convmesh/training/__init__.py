"""For training scripts: distributed models and their gradients, sharded data, checkpoints and export."""

from . import drift as drift
from .checkpoint import Checkpoint as Checkpoint
from .checkpoint import PendingCheckpoint as PendingCheckpoint
from .checkpoint import latest_checkpoint as latest_checkpoint
from .checkpoint import load_checkpoint as load_checkpoint
from .checkpoint import save_checkpoint as save_checkpoint
from .distribute import distribute as distribute
from .distribute import no_sync as no_sync
from .errors import CheckpointError as CheckpointError
from .export import export as export
from .export import full_state_dict as full_state_dict
from .loader import Loader as Loader
from .loader import loader as loader
from .region import from_region as from_region
from .region import region as region
from .region import replicate as replicate
from .region import shard as shard
