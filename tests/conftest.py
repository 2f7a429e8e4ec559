"""Fixtures for all tests."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

# Before torch is loaded. Threads that spin while they wait for each other take the cores from ranks and other runs: on
# a busy machine tests of a second took minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import convmesh
from tests.harness import Pool

convmesh.disable()  # a test that wants the rules says so

# Compiled code of earlier runs may be of earlier code: none is taken from other runs.
COMPILED = tempfile.mkdtemp(prefix="convmesh-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that have long tests: what is left at the end, workers can share evenly."""
    lengthy = {item.path for item in items for name in ("slow", "long") if item.get_closest_marker(name)}
    items.sort(key=lambda item: item.path not in lengthy)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes that all distributed tests of this run share; each worker of pytest-xdist has its own."""
    with Pool() as shared:
        yield shared
