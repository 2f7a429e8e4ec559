"""torchvision's names, for packages that import them and use none here: it has no build for every torch.

timm and segmentation_models_pytorch import transforms and datasets when they are imported themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME = "torchvision"


class _Names(ModuleType):
    """A module in which every name is a class that does nothing."""

    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Class(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Class(type):
    """With members of any name, such as those of an enumeration."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        made = cls()
        setattr(cls, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        ours = fullname == NAME or fullname.startswith(f"{NAME}.")
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def torchvision_names() -> Iterator[None]:
    """While other packages are imported. Afterwards nobody finds torchvision, or takes this for the real one."""
    if find_spec(NAME) is not None:
        yield
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name == NAME or name.startswith(f"{NAME}.")]:
            del sys.modules[name]
