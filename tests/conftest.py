"""Fixtures for all tests."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.harness import Pool

# Compiled code of earlier runs may be of earlier code: none is taken from other runs.
COMPILED = tempfile.mkdtemp(prefix="convmesh-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = COMPILED
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes that all distributed tests of this run share."""
    with Pool() as shared:
        yield shared
