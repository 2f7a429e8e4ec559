"""Small random programs on sharded tensors, and what one process makes of them.

An operator may be right on what a test gives it and wrong on what another operator leaves behind: parts of size 1 and
0, pending sums, strides that say nothing. A program is text, so that one that fails can be read, cut down and kept.
"""

from tests.programs.check import check as check
from tests.programs.operators import random_program as random_program
from tests.programs.program import LARGER_MESHES as LARGER_MESHES
from tests.programs.program import MESHES as MESHES
from tests.programs.program import Leaf as Leaf
from tests.programs.program import Program as Program
