"""Integers only: intervals, windows, splits and halo plans. Nothing here knows torch, and nothing communicates."""

from .convolution import Convolution as Convolution
from .convolution import Shape as Shape
from .interval import Interval as Interval
from .interval import hull as hull
from .interval import shards as shards
from .plan import HaloPlan as HaloPlan
from .split import Box as Box
from .split import Split as Split
from .split import slabs as slabs
from .split import volume as volume
from .window import Window as Window
