"""What `make check` runs has something of everything."""

from __future__ import annotations

from pathlib import Path

import convmesh
from tests.tier import TIER, paths

ROOT = Path(__file__).parent.parent


def test_every_package_has_tests_in_it() -> None:
    packages = {path.parent.name for path in Path(convmesh.__file__).parent.glob("*/__init__.py")}
    assert packages
    assert packages <= set(TIER), "a new package: name its quick tests in tests/tier.py"
    assert all(TIER.values())


def test_every_family_has_a_function_in_it() -> None:
    """The test itself fails if no rule of a family has run."""
    assert "ops/test_families.py" in TIER["ops"]


def test_all_of_it_exists() -> None:
    for path in paths():
        file, *names = path.split("::")
        assert (ROOT / file).exists(), path
        assert all(f"def {name}(" in (ROOT / file).read_text() for name in names), path
