"""Exchanges of halos are under way while a rank computes what it owns: the picture of docs/how-it-works.md."""

from __future__ import annotations

from tests.accelerator.overlap import convolution, under_way
from tests.accelerator.ranks import results


def test_a_rank_convolves_its_own_tile_while_halos_are_under_way() -> None:
    for traced in results(convolution):
        for events in traced.values():
            assert any(name.startswith("convolution") for name in under_way(events)), events
