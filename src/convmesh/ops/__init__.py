"""The operators, one family a file. Importing this package declares their rules."""

from . import conv as conv
from . import optim as optim
from . import random as random
