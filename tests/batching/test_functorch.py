"""The private names of torch that batching stands on."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

from convmesh.batching import _functorch
from convmesh.batching._functorch import Nature, nature_of


def find(name: str) -> Any:
    """By import as far as that goes, then by attribute."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return reduce(getattr, parts[count:], module)
    raise ImportError(name)


@pytest.mark.parametrize("name", _functorch.PRIVATE_NAMES)
def test_private_name_exists(name: str) -> None:
    assert find(name) is not None


def test_no_rule_runs_outside_of_vmap() -> None:
    with pytest.raises(RuntimeError, match=r"outside of torch.func.vmap"):
        _functorch.current_level()


def test_natures() -> None:
    seen: list[Nature] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(nature_of(x))
        return x.sum()

    plain = torch.randn(3)
    look(plain)
    look(torch.nn.Parameter(plain))
    grad(look)(plain)
    vmap(look)(plain.unsqueeze(0))
    look(plain.as_subclass(type("Other", (torch.Tensor,), {})))
    with torch.no_grad():
        look(torch.nn.Parameter(plain))
    with torch.device("meta"):
        look(torch.empty(3))
    assert seen == [
        *(Nature.PLAIN, Nature.TRACKED, Nature.TRACKED),
        *(Nature.OPAQUE, Nature.OPAQUE, Nature.PLAIN, Nature.PLAIN),
    ]
