"""Convolutional networks on a device mesh, with exactly the results of one device."""

from . import geometry as geometry
from ._torch import VERSION
from .api import disable as disable
from .api import enable as enable
from .batching import explain as explain
from .comm import CommunicationError as CommunicationError
from .comm import count_traffic as count_traffic
from .per_sample import clipped_gradient as clipped_gradient
from .per_sample import per_sample_gradients as per_sample_gradients
from .per_sample import per_sample_norms as per_sample_norms
from .planner import Device as Device
from .planner import Input as Input
from .planner import Plan as Plan
from .planner import PlanError as PlanError
from .planner import best_mesh as best_mesh
from .planner import plan as plan
from .sharding.buffer_factories import implicit_replication as implicit_replication
from .sharding.debug.rendezvous import MismatchError as MismatchError
from .sharding.errors import ShardingError as ShardingError
from .simulation import simulate as simulate
from .training import CheckpointError as CheckpointError
from .training import PendingCheckpoint as PendingCheckpoint
from .training import distribute as distribute
from .training import export as export
from .training import from_region as from_region
from .training import full_state_dict as full_state_dict
from .training import latest_checkpoint as latest_checkpoint
from .training import load_checkpoint as load_checkpoint
from .training import loader as loader
from .training import no_sync as no_sync
from .training import region as region
from .training import replicate as replicate
from .training import save_checkpoint as save_checkpoint
from .training import shard as shard

__version__ = VERSION
