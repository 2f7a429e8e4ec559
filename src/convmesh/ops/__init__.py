"""The operators, one family a file. Importing this package declares their rules."""

from . import conv as conv
from . import pad as pad
from . import select as select
from . import slicing as slicing
