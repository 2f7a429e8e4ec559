"""The operators, one family a file. Importing this package declares their rules."""

from . import conv as conv
from . import pool as pool
from . import adaptive as adaptive
from . import resample as resample
from . import grid as grid
from . import shuffle as shuffle
