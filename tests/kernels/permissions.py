"""Being another user, for tests of who may write what: also where root runs them, whom permissions do not stop."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NOBODY = 65534


@contextmanager
def unprivileged() -> Iterator[Path]:
    """Not root in this context; gives a directory of whoever it is."""
    root = os.geteuid() == 0
    directory = Path(tempfile.mkdtemp())
    try:
        if root:
            os.chown(directory, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield directory
    finally:
        if root:
            os.seteuid(0)
        shutil.rmtree(directory)


def given_to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can give it away; to others it looks as if it were another's."""
    if os.geteuid() == 0:
        os.lchown(path, NOBODY, NOBODY)  # a link itself, not what it points at
    else:
        monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
