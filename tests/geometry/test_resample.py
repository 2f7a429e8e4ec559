"""The taps of resampling are those of torch's own operators, and found without a look at every target."""

from __future__ import annotations

import random

import pytest
import torch

from convmesh.geometry import Interval, ShardedDependence, Taps, TransposedTaps, taps

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
        for index, some in enumerate(taps(mode, source, target, any(align), scale, False).of(Interval(0, target))):
            for at, weight in some:
                actual[index, at] = weight
        # A weight is the fraction of a coordinate up to `source`, which torch rounds to float32, and how depends on the
        # release: half a unit in the last place of that coordinate is what weights may differ by.
        assert (actual - expected).abs().max() < max(2e-6, source * 2**-24), (source, target, scale, align)


@pytest.mark.parametrize("mode", [*OPERATORS, "nearest_scaled"])
def test_transposed_taps_of_an_interval_are_all_that_read_it(mode: str) -> None:
    rng = random.Random(mode)
    for _ in range(60):
        source, target = rng.randint(1, 40), rng.randint(1, 60)
        forward = taps(mode, source, target, False, rng.choice([None, target / source]), rng.random() < 0.5)
        start = rng.randint(0, source - 1)
        some = Interval(start, rng.randint(start + 1, source))
        expected = [
            tuple((t, weight) for t in range(target) for at, weight in forward.at(t) if at == index)
            for index in range(some.start, some.stop)
        ]
        assert TransposedTaps(forward).of(some) == expected


def test_halos_of_a_large_image_need_the_taps_of_few_targets() -> None:
    seen: list[int] = []
    forward = taps("linear", 2**20, 2**21, False, None, False)
    counted = Taps(forward.target_size, lambda target: (seen.append(target), forward.at(target))[1])
    sharded = ShardedDependence(counted, 2**20, 2**21, (8,))
    assert sharded.source_plan.receives(3) == [(2, Interval(393215, 393216)), (4, Interval(524288, 524289))]
    assert sharded.target_plan.receives(3) == [(2, Interval(786431, 786432)), (4, Interval(1048576, 1048577))]
    assert len(seen) < 1000
