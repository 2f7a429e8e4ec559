"""The operators, one family a file. Importing this package declares their rules."""

from . import arg_reduce as arg_reduce
from . import conv as conv
from . import moments as moments
from . import reduce as reduce
from . import softmax as softmax
