"""vmap over convolutions: the rules, the choice of an algorithm, and gradients per sample."""

from ._functorch import innermost as innermost
from .choice import Decision as Decision
from .choice import Settings as Settings
from .choice import force as force
from .choice import forget as forget
from .choice import set_settings as set_settings
from .choice import settings as settings
from .explanation import explain as explain
from .machines import agree as agree
from .machines import agreed_machine as agreed_machine
from .machines import machine_of as machine_of
from .per_sample import clipped_gradient as clipped_gradient
from .per_sample import per_sample_gradients as per_sample_gradients
from .per_sample import per_sample_norms as per_sample_norms
from .registration import install as install
from .registration import installed as installed
from .registration import uninstall as uninstall
