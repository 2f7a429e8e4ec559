"""Moving data between ranks: lines of ranks, what a rank holds, and the exchange with its adjoint."""

from .exchange import Halo as Halo
from .exchange import Pending as Pending
from .exchange import give_back as give_back
from .exchange import start as start
from .gradients import BUCKET_BYTES as BUCKET_BYTES
from .gradients import Summation as Summation
from .gradients import Term as Term
from .gradients import sum_in_buckets as sum_in_buckets
from .held import Block as Block
from .held import Held as Held
from .held import memory_format as memory_format
from .line import Line as Line
from .line import line as line
from .owner import from_owner as from_owner
from .owner import owner_plan as owner_plan
from .recut import swap as swap
from .reduce import all_reduce as all_reduce
from .reduce import side_by_side as side_by_side
from .traffic import Traffic as Traffic
from .traffic import count_traffic as count_traffic
