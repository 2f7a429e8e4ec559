"""Know before you rent: memory, traffic and time of a training step on any mesh, without the hardware."""

from .devices import Device as Device
from .devices import Link as Link
from .plan import Plan as Plan
from .plan import best_mesh as best_mesh
from .plan import plan as plan
from .problem import Input as Input
from .problem import PlanError as PlanError
