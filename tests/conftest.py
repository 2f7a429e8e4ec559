"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The processes that all distributed tests of this run share."""
    with Pool() as shared:
        yield shared
