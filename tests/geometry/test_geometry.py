"""Intervals, windows, sharded dependences and plans against brute force over every index."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convmesh.geometry import HaloPlan, Interval, Reads, ShardedDependence, Window, hull, shards, slabs, volume
from tests.geometry.agreement import check_that_ranks_agree

settings.register_profile("geometry", max_examples=300, deadline=None)
settings.load_profile("geometry")

intervals = st.builds(lambda a, n: Interval(a, a + n), st.integers(-5, 15), st.integers(0, 8))
windows = st.builds(
    Window, kernel=st.integers(1, 6), stride=st.integers(1, 5), padding=st.integers(0, 7), dilation=st.integers(1, 4)
)
wide_windows = st.builds(
    Window, kernel=st.integers(1, 4), stride=st.integers(1, 3), padding=st.integers(0, 20), dilation=st.integers(1, 20)
)
mesh_sizes = st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Window, ShardedDependence]:
    window = draw(st.one_of(windows, wide_windows))
    if draw(st.booleans()):  # as a convolution has it
        fine = draw(st.integers(1, 30))
        coarse = window.coarse_size(fine)
    else:  # as a transposed convolution has it
        coarse = draw(st.integers(1, 12))
        fine = window.fine_size(coarse, draw(st.integers(0, max(window.stride, window.dilation) - 1)))
    if coarse <= 0 or fine <= 0:
        fine, coarse, window = 7, 7, Window(3, 1, 1)
    return window, ShardedDependence(window, fine, coarse, draw(mesh_sizes))


def touched(window: Window, coarse: int) -> set[int]:
    return {coarse * window.stride - window.padding + window.dilation * tap for tap in range(window.kernel)}


@given(intervals, intervals)
def test_intersection_and_length(a: Interval, b: Interval) -> None:
    both = set(range(a.start, a.stop)) & set(range(b.start, b.stop))
    assert set(range((a & b).start, (a & b).stop)) == both
    assert len(a & b) == len(both)
    assert a.covers(b) == (set(range(b.start, b.stop)) <= set(range(a.start, a.stop)))
    assert hull([a, b]).covers(a)
    assert hull([a, b]).covers(b)


@given(st.integers(0, 40), mesh_sizes, intervals)
def test_shards_are_found_by_arithmetic(size: int, sizes: tuple[int, ...], part: Interval) -> None:
    found = shards(size, sizes)
    assert [length for length, ranks in found.runs for _ in range(ranks)] == [len(shard) for shard in found]
    assert list(found.touching(part)) == [rank for rank, shard in enumerate(found) if shard & part]
    assert found.busy == sum(map(bool, found))
    assert found.even == (len({len(shard) for shard in found}) == 1)


@given(sharded())
def test_ranks_agree_on_what_they_send_each_other(case: tuple[Window, ShardedDependence]) -> None:
    check_that_ranks_agree(case[1].source_plan)
    check_that_ranks_agree(case[1].target_plan)


@given(st.integers(0, 40), mesh_sizes)
def test_shards_are_torch_chunks(size: int, sizes: tuple[int, ...]) -> None:
    pieces = [torch.arange(size)]
    for parts in sizes:
        cut = [list(piece.chunk(parts)) for piece in pieces]
        pieces = [chunk for chunks in cut for chunk in (*chunks, *[torch.arange(0)] * (parts - len(chunks)))]
    assert [list(range(i.start, i.stop)) for i in shards(size, sizes)] == [piece.tolist() for piece in pieces]


@given(windows, intervals, intervals)
def test_taps_are_all_pairs_of_a_coarse_index_and_a_fine_one_that_it_reads(
    window: Window, fine: Interval, coarse: Interval
) -> None:
    found = [
        (tap.index, o, i)
        for tap in window.taps(fine, coarse)
        for o, i in zip(
            range(tap.coarse.start, tap.coarse.stop), range(tap.fine.start, tap.fine.stop, tap.step), strict=True
        )
    ]
    assert found == [
        (index, o, i)
        for index in range(window.kernel)
        for o in range(coarse.start, coarse.stop)
        if (i := o * window.stride - window.padding + window.dilation * index) in fine
    ]


@given(wide_windows, intervals)
def test_parts_are_what_is_read_without_what_is_stepped_over(window: Window, side: Interval) -> None:
    everything = range(-200, 200)
    inside = range(side.start, side.stop)
    reads = {index for o in inside for index in touched(window, o)}
    read_by = {o for o in everything if touched(window, o) & set(inside)}
    for parts, exact, covering in (
        (window.parts_read(side), reads, window.reads(side)),
        (window.parts_read_by(side), read_by, window.read_by(side)),
    ):
        found = [index for part in parts for index in range(part.start, part.stop)]
        assert len(found) == len(set(found)), "no part overlaps another"
        assert found == sorted(found)
        assert exact <= set(found) <= set(range(covering.start, covering.stop))
        if window.dilation > (len(side) - 1) * window.stride + 1 and window.stride == 1:
            assert set(found) == exact


@given(wide_windows, intervals, intervals, st.integers(1, 4))
def test_pieces_of_a_tap_are_the_tap(window: Window, fine: Interval, coarse: Interval, most: int) -> None:
    for tap in window.taps(fine, coarse):
        pieces = list(tap.pieces(most))
        assert all(0 < len(piece.coarse) <= most for piece in pieces)
        assert [o for piece in pieces for o in range(piece.coarse.start, piece.coarse.stop)] == [
            *range(tap.coarse.start, tap.coarse.stop)
        ]
        assert [i for piece in pieces for i in range(piece.fine.start, piece.fine.stop, piece.step)] == [
            *range(tap.fine.start, tap.fine.stop, tap.step)
        ]


@given(windows, intervals)
def test_reads_is_the_hull_of_all_taps(window: Window, coarse: Interval) -> None:
    taps = {index for o in range(coarse.start, coarse.stop) for index in touched(window, o)}
    reads = window.reads(coarse)
    assert (reads.start, reads.stop) == ((min(taps), max(taps) + 1) if taps else (0, 0))


@given(windows, intervals)
def test_read_by_is_the_hull_of_all_readers(window: Window, fine: Interval) -> None:
    between = [o for o in range(-60, 60) if fine and window.reads(Interval(o, o + 1)) & fine]
    read_by = window.read_by(fine)
    assert [*range(read_by.start, read_by.stop)] == between


@given(windows, st.integers(1, 30))
def test_sizes_are_those_of_torch(window: Window, size: int) -> None:
    coarse = window.coarse_size(size)
    if coarse > 0:
        x, w = torch.zeros(1, 1, size), torch.zeros(1, 1, window.kernel)
        y = torch.nn.functional.conv1d(x, w, None, window.stride, window.padding, window.dilation)
        assert y.shape[-1] == coarse
        assert 0 <= size - window.fine_size(coarse) < window.stride or window.fine_size(coarse) < 0


@given(sharded())
def test_every_rank_can_compute_with_what_it_owns_and_receives(case: tuple[Window, ShardedDependence]) -> None:
    window, sharded = case
    for plan, produced, reads in (
        (sharded.source_plan, sharded.targets, lambda o: touched(window, o)),
        (
            sharded.target_plan,
            sharded.sources,
            lambda f: {o for o in range(sharded.target_size) if f in touched(window, o)},
        ),
    ):
        for rank, target in enumerate(produced):
            has = set(range(plan.owned[rank].start, plan.owned[rank].stop))
            for _, part in plan.receives(rank):
                arriving = set(range(part.start, part.stop))
                assert not arriving & has, "nothing arrives twice, and nothing that is owned"
                has |= arriving
            needed = {index for item in range(target.start, target.stop) for index in reads(item)}
            assert needed & set(range(plan.size)) <= has


@given(sharded())
def test_the_inner_part_needs_nobody(case: tuple[Window, ShardedDependence]) -> None:
    window, sharded = case
    for rank in range(len(sharded.sources)):
        fine, coarse = sharded.sources[rank], sharded.targets[rank]
        inner = sharded.inner_targets(rank)
        for o in range(coarse.start, coarse.stop):
            inside = touched(window, o) & set(range(sharded.source_size)) <= set(range(fine.start, fine.stop))
            assert not (o in inner and not inside)
            # An output that reads padding only may count as border; one that reads inside of the own part may not.
            assert o in inner or not fine.covers(window.reads(Interval(o, o + 1)))
        inner = sharded.inner_sources(rank)
        for f in range(fine.start, fine.stop):
            readers = {o for o in range(sharded.target_size) if f in touched(window, o)}
            assert not (f in inner and not readers <= set(range(coarse.start, coarse.stop)))


@given(sharded())
def test_own_padding_maps_the_own_sides_onto_each_other(case: tuple[Window, ShardedDependence]) -> None:
    window, sharded = case
    for fine, coarse in zip(sharded.sources, sharded.targets, strict=True):
        padding = window.own_padding(fine, coarse)
        if padding is not None:
            local = Window(window.kernel, window.stride, padding, window.dilation)
            assert local.coarse_size(len(fine)) == len(coarse)
            assert local.reads(Interval(0, 1)).shift(fine.start) == window.reads(
                Interval(coarse.start, coarse.start + 1)
            )


@given(st.lists(st.tuples(intervals, intervals), min_size=1, max_size=3))
def test_slabs_tile_the_border_without_overlap(sides: list[tuple[Interval, Interval]]) -> None:
    outer = tuple(a for a, _ in sides)
    inner = tuple(a & b for a, b in sides)
    if not volume(inner):
        return
    boxes = [box for boxes in slabs(outer, inner) for box in boxes]
    assert sum(map(volume, boxes)) == volume(outer) - volume(inner)
    for number, box in enumerate(boxes):
        assert all(whole.covers(side) for whole, side in zip(outer, box, strict=True))
        for other in (inner, *boxes[:number]):
            assert volume([a & b for a, b in zip(box, other, strict=True)]) == 0


def test_a_plan_in_parts_sends_each_part_to_who_needs_it() -> None:
    owned = shards(10, (3,))
    needed = ((Interval(8, 10), Interval(0, 2)), (Interval(4, 8),), ())
    plan = HaloPlan(owned, Reads(shards(3, (3,)), lambda part: needed[part.start], lambda _: Interval(0, 3)))
    assert plan.receives(0) == [(2, Interval(8, 10))]
    assert plan.sends(2) == [(0, Interval(8, 10))]
    assert plan.lacks(0) == 2
    assert not plan.silent
