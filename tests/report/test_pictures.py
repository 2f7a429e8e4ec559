"""Charts and pictures of shards: what is in them, where."""

from __future__ import annotations

import re

from convmesh.geometry import Interval
from convmesh.report.areas import Point, areas
from convmesh.report.charts import stacked
from convmesh.report.shards import loupe, plane, volume, window
from convmesh.report.words import count, duration, number, size


def test_a_plane_has_a_box_for_each_rank_and_one_for_what_is_read() -> None:
    drawn = plane((10, 6), (4, 2), halo=(Interval(2, 7), Interval(0, 4)))
    boxes = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', drawn)
    assert boxes[:2] == [("0", "0", "3", "3"), ("3", "0", "3", "3")]
    assert boxes[6] == ("0", "9", "3", "1"), "the last rows, which are fewer"
    assert boxes[8] == ("0", "2", "4", "5")


def test_a_volume_shows_the_faces_that_can_be_seen() -> None:
    drawn = volume((8, 8, 8), (2, 2, 2))
    assert drawn.count("<polygon") == 3 * 4
    assert "rank 3: 4 x 4 x 4" in drawn
    assert "rank 6" not in drawn, "it is behind the others"


def test_a_loupe_is_where_shards_meet() -> None:
    corner, side = window((64, 64), (2, 1), 24)
    assert (corner, side) == ((20, 20), 24)
    drawn = loupe([(0, (Interval(0, 16), Interval(0, 32)), (Interval(0, 17), Interval(0, 32)))], corner, side, 2.0)
    assert 'height="34"' in drawn, "17 rows, each of 2 of the input"


def test_areas_add_up() -> None:
    points = [Point([1, 2], "a", "forward", "3 at a"), Point([2, 8], "b & c", "backward", "10 at b & c")]
    drawn = areas(points, [("x", "red"), ("y", "blue")], lambda number: f"{number:g}", (12.0, "limit"))
    assert drawn.count("<path") == 2
    assert "10 at b &amp; c</b>" in drawn, "the peak says what it is"
    assert 'class="limit"' in drawn
    assert 'class="limit"' not in areas(points, [("x", "red")], str, (1e3, "far above"))


def test_a_bar_of_parts() -> None:
    assert stacked([("a", 1, "red"), ("b", 3, "blue")]).count("width: 25.000%") == 1


def test_words() -> None:
    assert [duration(seconds) for seconds in (2.5, 0.0314, 12e-6)] == ["2.50 s", "31.4 ms", "12.0 µs"]
    assert [number(value) for value in (0, 0.001234, 1, 12.34, 3350)] == ["0", "0.00123", "1.00", "12.3", "3,350"]
    assert [size(value) for value in (999_600, 5e13)] == ["1.00 MB", "50.0 TB"]
    assert [count(ranks, "rank") for ranks in (1, 4096)] == ["1 rank", "4,096 ranks"]
