"""Neural operators."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.zoo.network import IMAGE, SIGNAL, VOLUME, Network


def make(name: str, **options: Any) -> Any:
    import neuralop.models

    return getattr(neuralop.models, name)(**options)


FEW: dict[str, Any] = {"in_channels": 2, "out_channels": 1, "hidden_channels": 8, "n_layers": 2}
ZOO = [
    Network("neuraloperator", "FNO 1d", partial(make, "FNO", n_modes=(8,), **FEW), (2, 2, 64), SIGNAL),
    Network("neuraloperator", "FNO 2d", partial(make, "FNO", n_modes=(6, 6), **FEW), (1, 2, 24, 32), IMAGE),
    Network("neuraloperator", "FNO 3d", partial(make, "FNO", n_modes=(4, 4, 4), **FEW), (1, 2, 12, 12, 16), VOLUME),
    Network("neuraloperator", "TFNO 2d", partial(make, "TFNO", n_modes=(6, 6), factorization="tucker", rank=0.5, **FEW),
            (1, 2, 24, 32), IMAGE),
    Network("neuraloperator", "UNO", partial(make, "UNO", in_channels=2, out_channels=1, hidden_channels=8, n_layers=3,
            uno_out_channels=[8, 8, 8], uno_n_modes=[[6, 6], [4, 4], [6, 6]],
            uno_scalings=[[1.0, 1.0], [0.5, 0.5], [2.0, 2.0]]), (1, 2, 24, 32), IMAGE),
]  # fmt: skip
