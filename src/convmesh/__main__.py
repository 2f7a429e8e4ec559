"""`python -m convmesh` is `convmesh`."""

import sys

from .cli import main

sys.exit(main())
