"""Neural operators."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import IMAGE, SIGNAL, VOLUME, Layout, Network


def make(name: str, **options: Any) -> Any:
    import neuralop.models

    return getattr(neuralop.models, name)(**options)


FEW: dict[str, Any] = {"in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 2}
TUCKER: dict[str, Any] = {"factorization": "tucker", "rank": 0.5}


def entry(name: str, kind: str, shape: tuple[int, ...], layouts: tuple[Layout, ...], **options: Any) -> Network:
    """Their spectra are complex64, whatever they are given."""
    return Network("neuraloperator", name, partial(make, kind, **options), shape, layouts, single=True)


ZOO = [
    entry("FNO 1d", "FNO", (2, 2, 64), SIGNAL, n_modes=(8,), **FEW),
    entry("FNO 2d", "FNO", (1, 2, 24, 32), IMAGE, n_modes=(6, 6), **FEW),
    entry("FNO 3d", "FNO", (1, 2, 12, 12, 16), VOLUME, n_modes=(4, 4, 4), **FEW),
    entry("TFNO 2d", "TFNO", (1, 2, 24, 32), IMAGE, n_modes=(6, 6), **TUCKER, **FEW),
    entry("UNO", "UNO", (1, 2, 24, 32), IMAGE, in_channels=2, out_channels=1, hidden_channels=8, n_layers=3,
          uno_out_channels=[8, 8, 8], uno_n_modes=[[6, 6], [4, 4], [6, 6]],
          uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]], channel_mlp_skip="linear"),
]  # fmt: skip
