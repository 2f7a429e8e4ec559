"""Integers only: intervals, windows, splits and halo plans. Nothing here knows torch, and nothing communicates."""

from . import index_map as index_map
from .bundles import Bundle as Bundle
from .bundles import adaptive_bundles as adaptive_bundles
from .convolution import Convolution as Convolution
from .convolution import Shape as Shape
from .index_map import IndexMap as IndexMap
from .index_map import Piece as Piece
from .interval import Interval as Interval
from .interval import hull as hull
from .interval import shards as shards
from .plan import HaloPlan as HaloPlan
from .pooling import Pooling as Pooling
from .reading import Cut as Cut
from .reading import Reading as Reading
from .reading import Repeat as Repeat
from .reading import Runs as Runs
from .regroup import merged as merged
from .regroup import where_cut as where_cut
from .resample import Taps as Taps
from .resample import taps as taps
from .slots import Slots as Slots
from .split import Box as Box
from .split import Split as Split
from .split import slabs as slabs
from .split import volume as volume
from .window import Window as Window
