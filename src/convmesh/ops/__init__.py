"""The operators, one family a file. Importing this package declares their rules."""

from . import attention as attention
from . import conv as conv
from . import gather_index as gather_index
from . import join as join
from . import linear as linear
from . import pad as pad
from . import parts as parts
from . import select as select
from . import slicing as slicing
from . import turn as turn
from . import unfold as unfold
from . import view as view
