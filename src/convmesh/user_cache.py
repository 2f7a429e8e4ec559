"""Where things are kept that are made once for a machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """$CONVMESH_CACHE, or else a directory in the user's cache."""
    home = os.environ.get("CONVMESH_CACHE")
    return Path(home) if home else Path.home() / ".cache" / "convmesh"
