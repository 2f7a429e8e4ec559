"""All of torch's private names that convmesh uses, but for functorch's. Nothing else in the library touches one.

`REQUIRED` lists them, so that a test can say which one a new torch release has lost.
"""

from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from .arrivals import memory_of as memory_of
from .collectives import all_reduce as all_reduce
from .collectives import all_to_all as all_to_all
from .collectives import intercept_collectives as intercept_collectives
from .collectives import under_way as under_way
from .collectives import wait as wait
from .dispatch import as_view as as_view
from .dispatch import handlers as handlers
from .dispatch import in_backward as in_backward
from .dispatch import replicate_implicitly as replicate_implicitly
from .dispatch import replicates_implicitly as replicates_implicitly
from .dispatch import stock as stock
from .dispatch import view_rule as view_rule
from .dispatch import when_backward_ends as when_backward_ends
from .groups import group_called as group_called
from .groups import inherit_timeout as inherit_timeout
from .groups import store as store
from .groups import timeout_of as timeout_of
from .names import COLLECTIVES as COLLECTIVES
from .names import REQUIRED as REQUIRED
from .names import VERSION as VERSION
from .names import Handler as Handler
from .names import Operator as Operator
from .names import Spec as Spec
from .names import Store as Store
from .names import check_version as check_version
from .operators import Signature as Signature
from .operators import arguments as arguments
from .operators import autograd_keys as autograd_keys
from .operators import call as call
from .operators import composite as composite
from .operators import composite_operators as composite_operators
from .operators import gives_one_tensor as gives_one_tensor
from .operators import is_composite as is_composite
from .operators import name_of as name_of
from .operators import signature as signature
from .operators import takes_tensors as takes_tensors
from .operators import view_operators as view_operators
from .operators import writing_operators as writing_operators
from .tensors import eager_spec_of as eager_spec_of
from .tensors import give_attributes as give_attributes
from .tensors import in_rank_order as in_rank_order
from .tensors import local_of as local_of
from .tensors import make_spec as make_spec
from .tensors import noted as noted
from .tensors import opened as opened
from .tensors import owns_storage as owns_storage
from .tensors import plain as plain
from .tensors import plain_order as plain_order
from .tensors import redistribute as redistribute
from .tensors import relocate as relocate
from .tensors import shares_memory as shares_memory
from .tensors import spec_of as spec_of
from .tensors import whole_data as whole_data
from .tensors import wrap as wrap
from .tracing import compile_for_any_rank as compile_for_any_rank
from .tracing import keep_whole as keep_whole
from .tracing import no_modes as no_modes
from .tracing import tie as tie
from .tracing import tracing as tracing
