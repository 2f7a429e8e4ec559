"""vmap over convolutions: the rules, and the choice of an algorithm."""

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
from .registration import install as install
from .registration import installed as installed
from .registration import uninstall as uninstall
