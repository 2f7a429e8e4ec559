"""Every test of this directory runs with the rules in place, and leaves torch as it was."""

from collections.abc import Iterator

import pytest
import torch

from convmesh import batching


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    torch.manual_seed(0)
    batching.install()
    yield
    batching.uninstall()
