"""Convolutional networks on a device mesh, with exactly the results of one device."""

from . import geometry as geometry
from .api import disable as disable
from .api import enable as enable
from .comm import count_traffic as count_traffic
from .sharding.errors import ShardingError as ShardingError

__version__ = "0.1.0"
