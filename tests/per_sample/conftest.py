"""Every test of this directory runs with the rules of vmap in place, too."""

from tests.batching.conftest import _rules as _rules
