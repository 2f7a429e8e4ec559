"""Integers only: intervals, windows, splits and halo plans. Nothing here knows torch, and nothing communicates."""

from . import index_map as index_map
from .convolution import Convolution as Convolution
from .convolution import Shape as Shape
from .index_map import IndexMap as IndexMap
from .index_map import Piece as Piece
from .interval import Interval as Interval
from .interval import hull as hull
from .interval import shards as shards
from .plan import HaloPlan as HaloPlan
from .regroup import where_cut as where_cut
from .split import Box as Box
from .split import Split as Split
from .split import slabs as slabs
from .split import volume as volume
from .window import Window as Window
