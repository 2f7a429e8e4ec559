"""Operator rules: one folder per family of docs/operators.md. Importing this package declares all of them."""

from importlib import import_module
from pkgutil import walk_packages

for _module in walk_packages(__path__, f"{__name__}."):
    import_module(_module.name)
