"""Strided groups of adaptive windows, and pieces of index maps, against counting one by one."""

from hypothesis import given
from hypothesis import strategies as st

from convmesh.geometry import AdaptiveWindows, Interval, Piece, strided_windows

sizes = st.integers(1, 40)


@given(sizes, sizes, st.data())
def test_groups_have_every_window_that_touches_the_sources_once(source: int, target: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, source - 1))
    sources = Interval(start, data.draw(st.integers(start + 1, source)))
    windows = AdaptiveWindows(source, target)
    targets = windows.read_by(sources)
    assert Interval(0, target).covers(targets)
    found: dict[int, tuple[Interval, int]] = {}
    for group in strided_windows(windows, sources, targets):
        assert group.length <= group.step
        assert group.start + group.count * group.step <= len(sources)
        for i in range(group.count):
            at = group.start + group.step * i
            number = group.target + group.target_step * i
            assert number not in found
            found[number] = (Interval(at, at + group.length), group.full_length)
    expected = {
        t - targets.start: ((windows.window(t) & sources).shift(-start), len(windows.window(t)))
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
