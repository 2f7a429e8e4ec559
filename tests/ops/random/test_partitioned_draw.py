"""Ranks that draw the zeros and ones of one device together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from convmesh.ops.random import bernoulli, partitioned_draw, replicated_draw
from tests.cases import place
from tests.harness import Pool

Places = tuple[Any, ...]
# Few and many ranges of memory, even and uneven parts, and dimensions with less to share than there are ranks.
SHAPES = [(3, 4, 7, 5), (8, 3, 2, 5), (1, 1, 9, 2), (2, 6, 1, 3), (5,), (1, 3), (2, 3, 4, 5, 2)]
PLACES: dict[tuple[int, ...], list[Places]] = {
    (2,): [(0,), (1,), (2,), (3,), ("R",), ("P",)],
    (4,): [(0,), (1,), (2,), (3,)],
    (2, 2): [(0, 1), (0, 2), (1, 2), (2, 3), (3, 2), (3, 3), (1, 0), ("R", 1), (2, "R"), ("P", 2)],
    (4, 1): [(2, 3), (1, 0)],
}


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    at: Places
    channels_last: bool = False
    block: int = 7
    before: int = 1  # words that the generator has given
    p: float = 0.3


@contextmanager
def sharing() -> Iterator[list[int]]:
    """However little there is to draw; with how many elements a rank has drawn."""
    drawn: list[int] = []
    draw = bernoulli._draw_share

    def note(*args: Any) -> torch.Tensor:
        result = draw(*args)
        drawn.append(result.numel())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partitioned_draw, "JUMP", -(10**9))
        patch.setattr(bernoulli, "_draw_share", note)
        yield drawn


def each(mesh: DeviceMesh, check: Callable[[DeviceMesh, Case], None], given: list[Case]) -> None:
    with convmesh.enable():
        for case in given:
            check(mesh, case)


def filled(mesh: DeviceMesh, case: Case) -> None:
    value = torch.rand(case.shape)
    if case.channels_last:
        value = value.contiguous(memory_format=torch.channels_last)
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    for generator in (ours, theirs):
        torch.empty(case.before).uniform_(generator=generator)
    expected = torch.empty_like(value).bernoulli_(case.p, generator=theirs)
    with sharing() as drawn, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bernoulli, "BLOCK", case.block)
        found = torch.empty_like(place(value, mesh, case.at)).bernoulli_(case.p, generator=ours)
    if "P" in case.at:  # a Partial stays one: one of its ranks has all of the numbers
        assert torch.equal(found.full_tensor(), expected), case
    else:
        assert torch.equal(found.to_local(), place(expected, mesh, case.at).to_local()), case
    assert torch.equal(ours.get_state(), theirs.get_state()), case
    assert len(drawn) == any(isinstance(where, int) and mesh.size(m) > 1 for m, where in enumerate(case.at)), case


def cases(places: list[Places]) -> list[Case]:
    fitting = [
        (shape, at) for shape in SHAPES for at in places
        if all(where < len(shape) for where in at if isinstance(where, int))
    ]  # fmt: skip
    made = [Case(shape, at) for shape, at in fitting]
    made += [Case(shape, at, channels_last=True) for shape, at in fitting if len(shape) == 4]
    others = [{"block": 1}, {"block": 1000}, {"before": 624}, {"before": 0}, {"p": 0.0}, {"p": 1.0}]
    return made + [Case(SHAPES[0], at, **other) for at in places for other in others]


@pytest.mark.parametrize("mesh", PLACES)
def test_bit_for_bit_what_one_process_draws(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run(each, filled, cases(PLACES[mesh]), mesh=mesh)


def test_on_part_of_the_world(pool: Pool) -> None:
    pool.run(each, filled, cases([(0,), (2,)]), mesh=(2,), ranks=(1, 3))


def dropped(mesh: DeviceMesh, case: Case) -> None:
    at, value = case.at, torch.randn(case.shape, generator=torch.Generator().manual_seed(1))
    if case.channels_last:
        value = value.contiguous(memory_format=torch.channels_last)
    results = []
    for x in (value.clone(), place(value, mesh, at)):
        torch.manual_seed(5)
        with sharing() as drawn, CommDebugMode() as communication:
            x.requires_grad_()
            y = F.dropout(x, 0.3)
            y.backward(x.detach())
            with torch.inference_mode():  # another operator, which draws in another order
                again = F.dropout(x, 0.4)
        results.append((y.detach(), x.grad, again.clone(), torch.get_rng_state()))
    assert len(drawn) == 2, case
    assert not any("gather" in str(kind) for kind in communication.get_comm_counts()), case
    expected, found = results
    assert torch.equal(found[3], expected[3]), case
    for ours, theirs in zip(found[:3], expected[:3], strict=True):
        assert torch.equal(ours.to_local(), place(theirs, mesh, at).to_local()), case


def test_dropout_forward_and_backward(pool: Pool) -> None:
    for mesh, places in PLACES.items():
        cut = [at for at in places if "P" not in at and at != ("R",)]
        pool.run(each, dropped, [Case((3, 4, 7, 5), at, last) for at in cut for last in (False, True)], mesh=mesh)


def balanced(mesh: DeviceMesh, case: Case) -> int:
    with sharing() as drawn, convmesh.enable():
        place(torch.rand(case.shape), mesh, case.at).bernoulli_(0.5)
    return drawn[0]


def test_ranks_draw_equal_shares(pool: Pool) -> None:
    for at in [(0, 1), (0, 2), (1, 2), (2, 3), (3, 3)]:
        assert pool.run(balanced, Case((4, 8, 4, 4), at)) == [4 * 8 * 4 * 4 // 4] * 4, at


def of_millions(mesh: DeviceMesh, at: Places) -> int:
    """Without being made to."""
    shape, drawn = (4, 32, 128, 260), []
    draw = bernoulli._draw_share
    torch.manual_seed(5)
    expected = torch.empty(shape).bernoulli_(0.9)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.MonkeyPatch.context() as patch, convmesh.enable():
        patch.setattr(bernoulli, "_draw_share", lambda *args: drawn.append(draw(*args)) or drawn[-1])
        found = place(expected, mesh, at).zero_().bernoulli_(0.9)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found.to_local(), place(expected, mesh, at).to_local())
    return drawn[0].numel()


def test_millions_of_elements_are_shared(pool: Pool) -> None:
    half = 2 * 32 * 128 * 260
    assert pool.run_cases(of_millions, [(0,), (3,)], mesh=(2,)) == [[half, half], [half, half]]


def beyond(mesh: DeviceMesh, at: Places) -> None:
    """More elements than other operators draw at once."""
    value = torch.ones(3, 4, 7, 5)
    torch.manual_seed(5)
    expected = F.dropout(value, 0.3)
    state = torch.get_rng_state()
    for forced in (False, True):
        torch.manual_seed(5)
        with sharing() as drawn, pytest.MonkeyPatch.context() as patch, convmesh.enable():
            patch.setattr(replicated_draw, "LARGEST_DRAWN", 100)
            patch.setattr(partitioned_draw, "JUMP", partitioned_draw.JUMP if forced else 10**9)
            found = F.dropout(place(value, mesh, at), 0.3)
        assert torch.equal(found.to_local(), place(expected, mesh, at).to_local())
        assert torch.equal(torch.get_rng_state(), state)
        assert len(drawn) == (forced and at != ("R",))


def test_at_any_size(pool: Pool) -> None:
    pool.run_cases(beyond, [("R",), (0,), (1,), (2,)], mesh=(4,))


def on_different_cpus(mesh: DeviceMesh, unable: int | None) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == unable:
            patch.setattr(bernoulli, "_uses_64_bits_per_element", lambda: False)
        return bool(bernoulli._all_can_share.__wrapped__(mesh))


def test_what_one_rank_cannot_do_none_does(pool: Pool) -> None:
    assert pool.run_cases(on_different_cpus, [None, 0, 3], mesh=(2, 2)) == [[True] * 4, [False] * 4, [False] * 4]
