"""The taps of resampling are those of torch's own operators."""

from __future__ import annotations

import random

import pytest
import torch

from convmesh.geometry import Interval, Runs, taps

aten = torch.ops.aten
OPERATORS = {
    "nearest": aten.upsample_nearest2d,
    "nearest_exact": aten._upsample_nearest_exact2d,
    "linear": aten.upsample_bilinear2d,
    "cubic": aten.upsample_bicubic2d,
    "linear_aa": aten._upsample_bilinear2d_aa,
    "cubic_aa": aten._upsample_bicubic2d_aa,
    "lanczos_aa": aten._upsample_lanczos2d_aa,
}


@pytest.mark.parametrize("mode", OPERATORS)
def test_weights_are_torchs(mode: str) -> None:
    rng = random.Random(mode)
    for _ in range(60):
        source = rng.choice([rng.randint(1, 40), rng.randint(1, 300)])
        scale = rng.choice([None, 2.0, 0.5, 1.5, 1.3, 0.7, 3.0, 1 / 3, 2.7, 1.0, 1.05])
        target = rng.randint(1, 2 * source) if scale is None else int(source * scale)
        align = () if mode.startswith("nearest") else (rng.random() < 0.4,)
        if target < 1:
            continue
        # One source a row is 1 and the others are 0, so that the output has the weight of each.
        identity = torch.eye(source, dtype=torch.float32)[:, None, None]
        expected = OPERATORS[mode](identity, [1, target], *align, 1.0, scale)[:, 0, 0].T
        actual = torch.zeros(target, source)
        for index, some in enumerate(taps(mode, source, target, any(align), scale, False).of):
            for at, weight in some:
                actual[index, at] = weight
        # A weight is the fraction of a coordinate up to `source`, which torch rounds to float32, and how depends on the
        # release: half a unit in the last place of that coordinate is what weights may differ by.
        assert (actual - expected).abs().max() < max(2e-6, source * 2**-24), (source, target, scale, align)


@pytest.mark.parametrize(("source", "target"), [(7, 3), (3, 7), (12, 4), (1, 5), (13, 13)])
def test_adaptive_runs_and_their_readers_agree(source: int, target: int) -> None:
    runs = Runs.adaptive(source, target)
    for index in range(source):
        readers = [t for t in range(target) if index in runs.reads(Interval(t, t + 1))]
        assert runs.read_by(Interval(index, index + 1)) == Interval(readers[0], readers[-1] + 1)
