"""The operators, one family a file. Importing this package declares their rules."""

from . import adaptive as adaptive
from . import affine_grid as affine_grid
from . import conv as conv
from . import grid as grid
from . import pool as pool
from . import resample as resample
from . import shuffle as shuffle
from . import unpool as unpool
