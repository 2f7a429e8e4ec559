"""Index maps against what torch does to a list of indices."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from convmesh.geometry import (
    HaloPlan,
    IndexMap,
    Interval,
    Reads,
    Shards,
    are_merged,
    dim_with_same_shards,
    index_map,
    shards,
)
from tests.geometry.agreement import check_that_ranks_agree

SIZES = st.integers(1, 9)


def outputs(made: IndexMap, *sources: list[int]) -> list[int | None]:
    """What the map makes of lists."""
    result: list[int | None] = [None] * made.size
    for piece in made.pieces:
        for j in range(piece.count):
            result[piece.out_start + piece.out_step * j] = sources[piece.source][piece.in_start + piece.in_step * j]
    return result


@given(SIZES, st.integers(-4, 4), st.integers(-4, 4))
def test_padding(size: int, before: int, after: int) -> None:
    values = torch.arange(size, dtype=torch.float64).view(1, 1, size)
    if size + before + after < 1 or size + min(0, before) + min(0, after) < 1:
        return
    for mode, make in (("reflect", index_map.reflection_pad), ("replicate", index_map.replication_pad)):
        if mode == "replicate" or max(before, after) < size:
            expected = F.pad(values, (before, after), mode).flatten().tolist()
            assert outputs(make(size, before, after), list(range(size))) == expected
    padded = F.pad(values, (before, after), value=-1).flatten().tolist()
    made = outputs(index_map.constant_pad(size, before, after), list(range(size)))
    assert [-1 if value is None else value for value in made] == padded


@given(SIZES, st.integers(0, 8), st.integers(0, 8), st.integers(1, 4), st.integers(-9, 9))
def test_slices_and_turns(size: int, start: int, count: int, step: int, shift: int) -> None:
    values = list(range(size))
    taken = values[start : start + count * step : step]
    first = min(start, size)
    assert outputs(index_map.strided(len(taken), first, step), values) == taken
    back = outputs(index_map.slice_backward(size, len(taken), first, step), taken)
    assert [value for value in back if value is not None] == taken
    replaced = values.copy()
    replaced[start : start + count * step : step] = [-1] * len(taken)
    assert outputs(index_map.slice_scatter(size, len(taken), first, step), values, [-1] * len(taken)) == replaced
    assert outputs(index_map.flipped(size), values) == values[::-1]
    assert outputs(index_map.rolled(size, shift), values) == torch.tensor(values).roll(shift).tolist()
    assert outputs(index_map.joined([size, 0, size]), values, [], values) == values * 2


@given(SIZES, st.integers(0, 5), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9))
def test_parts_of_a_map_read_what_their_outputs_copy(size: int, before: int, after: int, a: int, b: int) -> None:
    made = index_map.replication_pad(size, before, after)
    out = Interval(min(a, b), max(a, b)) & Interval(0, made.size)
    copied = set(outputs(made, list(range(size)))[out.start : out.stop])
    parts = made.reads(out)
    assert {index for part in parts for index in range(part.start, part.stop)} == copied
    assert all(one.stop < other.start for one, other in pairwise(parts))


@given(st.lists(SIZES, min_size=2, max_size=4), st.integers(0, 2), st.integers(1, 4))
def test_flattened_cuts_are_the_same_elements(shape: list[int], first: int, ranks: int) -> None:
    first = min(first, len(shape) - 2)
    merged = [*shape[:first], shape[first] * shape[first + 1], *shape[first + 2 :]]
    everything = torch.arange(torch.Size(shape).numel())
    for dim in range(len(shape)):
        new = dim_with_same_shards(dim, shape, merged, (ranks,))
        if new is not None:
            for old_part, new_part in zip(shards(shape[dim], (ranks,)), shards(merged[new], (ranks,)), strict=True):
                old = everything.view(shape).narrow(dim, old_part.start, len(old_part))
                renewed = everything.view(merged).narrow(new, new_part.start, len(new_part))
                assert old.flatten().tolist() == renewed.flatten().tolist()


def test_dimensions_that_become_one() -> None:
    image, tokens = (2, 6, 4, 5), (2, 6, 20)
    assert [are_merged(3, dim, image, tokens) for dim in range(4)] == [False, False, True, True]
    assert [are_merged(1, dim, image, (2, 120)) for dim in range(4)] == [False, True, True, True]


@given(st.data(), SIZES, st.lists(st.integers(1, 5), min_size=1, max_size=2).map(tuple))
def test_ranks_agree_on_what_they_send_each_other(data: st.DataObject, size: int, mesh_sizes: tuple[int, ...]) -> None:
    step, start = data.draw(st.integers(1, 5)), data.draw(st.integers(0, size))
    count = -(-(size - start) // step)
    before, after = data.draw(st.integers(0, max(0, size - 1))), data.draw(st.integers(0, max(0, size - 1)))
    maps = [
        index_map.strided(count, start, step), index_map.slice_backward(size, count, start, step),
        index_map.flipped(size), index_map.rolled(size, start), index_map.constant_pad(size, before - 2, after - 3),
        index_map.reflection_pad(size, before, after), index_map.joined([size, count, size]),
    ]  # fmt: skip
    for made in maps:
        for source in range(max([piece.source for piece in made.pieces], default=0) + 1):
            own = Shards(count if source == 1 else made_from(made, size, count), mesh_sizes)
            reads = Reads(Shards(made.size, mesh_sizes), partial(made.reads, source=source),
                          partial(made.read_by, source=source))  # fmt: skip
            check_that_ranks_agree(HaloPlan(own, reads))


def made_from(made: index_map.IndexMap, size: int, count: int) -> int:
    """The size of the first source: only `slice_backward` has the slice itself."""
    return count if any(piece.out_step > 1 for piece in made.pieces) else size
