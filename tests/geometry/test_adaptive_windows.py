"""Bundles of adaptive windows, and pieces of index maps, against counting one by one."""

from hypothesis import given
from hypothesis import strategies as st

from convmesh.geometry import Interval, Piece, Runs, adaptive_bundles

sizes = st.integers(1, 40)


@given(sizes, sizes, st.data())
def test_bundles_have_every_window_that_touches_the_sources_once(source: int, target: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, source - 1))
    sources = Interval(start, data.draw(st.integers(start + 1, source)))
    runs = Runs.adaptive(source, target)
    targets = runs.read_by(sources) & Interval(0, target)
    found: dict[int, tuple[Interval, int]] = {}
    for bundle in adaptive_bundles(source, target, sources, targets):
        assert bundle.length <= bundle.step
        assert bundle.start + bundle.count * bundle.step <= len(sources)
        for i in range(bundle.count):
            at = bundle.start + bundle.step * i
            number = bundle.target + bundle.target_step * i
            assert number not in found
            found[number] = (Interval(at, at + bundle.length), bundle.whole)
    expected = {
        t - targets.start: ((runs.reads(Interval(t, t + 1)) & sources).shift(-start), runs.stops[t] - runs.starts[t])
        for t in range(targets.start, targets.stop)
    }
    assert found == expected


@given(
    st.integers(0, 6), st.integers(0, 5), st.integers(6, 20), st.integers(1, 3), st.integers(-3, 3),
    st.integers(-2, 24), st.integers(0, 12),
)  # fmt: skip
def test_a_piece_is_cut_by_what_it_copies(
    count: int, out_start: int, in_start: int, out_step: int, in_step: int, start: int, length: int
) -> None:
    def pairs(piece: Piece) -> list[tuple[int, int]]:
        return [(piece.out_start + piece.out_step * j, piece.in_start + piece.in_step * j) for j in range(piece.count)]

    piece = Piece(count, out_start, in_start, out_step, in_step)
    source = Interval(start, start + length)
    assert pairs(piece.copying(source)) == [pair for pair in pairs(piece) if pair[1] in source]
