"""The operators, one family a file. Importing this package declares their rules."""

from . import arg_reduce as arg_reduce
from . import attention as attention
from . import batch_norm as batch_norm
from . import batch_norm_backward as batch_norm_backward
from . import conv as conv
from . import cross_entropy as cross_entropy
from . import gather_index as gather_index
from . import group_norm as group_norm
from . import instance_norm as instance_norm
from . import join as join
from . import layer_norm as layer_norm
from . import linear as linear
from . import loss as loss
from . import moments as moments
from . import nll_loss as nll_loss
from . import pad as pad
from . import parts as parts
from . import reduce as reduce
from . import rms_norm as rms_norm
from . import scale as scale
from . import select as select
from . import slicing as slicing
from . import softmax as softmax
from . import turn as turn
from . import unfold as unfold
from . import view as view
