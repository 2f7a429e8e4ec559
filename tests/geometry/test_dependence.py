"""Every kind of dependence, and what is sharded by it, against its targets one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convmesh.geometry import (
    AdaptiveWindows,
    Dependence,
    Interval,
    Repeat,
    ShardedDependence,
    TransposedTaps,
    Window,
    taps,
)
from tests.geometry.agreement import check_that_ranks_agree

MODES = "nearest", "nearest_exact", "nearest_scaled", "linear", "cubic", "linear_aa", "cubic_aa", "lanczos_aa"
sizes = st.integers(1, 30)
mesh_sizes = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)


@st.composite
def sharded(draw: st.DrawFn) -> ShardedDependence:
    source, target = draw(sizes), draw(sizes)
    kind = draw(st.sampled_from(["adaptive", "repeat", "window", "taps", "transposed"]))
    dependence: Dependence = AdaptiveWindows(source, target)
    if kind == "repeat":
        factor = draw(st.integers(1, 5))
        dependence, target = Repeat(factor), source * factor
    elif kind == "window":
        step = draw(st.integers(1, 5))
        dependence, source = Window(step, step), target * step
    elif kind != "adaptive":
        made = taps(draw(st.sampled_from(MODES)), source, target, False, None, draw(st.booleans()))
        dependence = made if kind == "taps" else TransposedTaps(made)
        source, target = (source, target) if kind == "taps" else (target, source)
    return ShardedDependence(dependence, source, target, draw(mesh_sizes))


def read(along: ShardedDependence, target: int) -> set[int]:
    one = along.dependence.reads(Interval(target, target + 1))
    return set(range(one.start, one.stop))


@given(sharded(), st.data())
def test_read_by_is_the_hull_of_the_targets_that_read_any_of_it(along: ShardedDependence, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, along.source_size - 1))
    some = Interval(start, data.draw(st.integers(start + 1, along.source_size)))
    readers = [t for t in range(along.target_size) if read(along, t) & set(range(some.start, some.stop))]
    found = along.read_by(some)
    assert found == Interval(readers[0], readers[-1] + 1) if readers else not found
    everything = along.dependence.reads(found)
    assert set(range(everything.start, everything.stop)) >= {index for t in readers for index in read(along, t)}


@given(sharded())
def test_ranks_have_what_they_need_and_the_inner_part_needs_nobody(along: ShardedDependence) -> None:
    for rank, (own, produced) in enumerate(zip(along.sources, along.targets, strict=True)):
        mine = set(range(own.start, own.stop))
        arriving = {i for _, part in along.source_plan.receives(rank) for i in range(part.start, part.stop)}
        inner = along.inner_targets(rank)
        for target in range(produced.start, produced.stop):
            assert read(along, target) <= mine | arriving
            assert (target in inner) == (read(along, target) <= mine) or not read(along, target)
        others = {t for t in range(along.target_size) if t not in produced}
        for source in mine:
            read_elsewhere = any(source in read(along, t) for t in others)
            assert not (source in along.inner_sources(rank) and read_elsewhere)


@given(sharded())
def test_ranks_agree_on_what_they_send_each_other(along: ShardedDependence) -> None:
    check_that_ranks_agree(along.source_plan)
    check_that_ranks_agree(along.target_plan)
