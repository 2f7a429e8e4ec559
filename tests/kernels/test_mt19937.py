"""A generator that jumps ahead is, byte for byte, where it is after drawing."""

from __future__ import annotations

import pytest
import torch

from convmesh.kernels import mt19937
from convmesh.kernels.mt19937 import advanced, can_advance

BLOCK = mt19937.WORDS


def after(words: int, state: torch.Tensor | None = None) -> torch.Tensor:
    """A generator's state after drawing so many words: a uniform float32 takes one."""
    generator = torch.Generator().manual_seed(7)
    if state is not None:
        generator.set_state(state)
    torch.empty(words).uniform_(generator=generator)
    return generator.get_state()


@pytest.mark.parametrize("before", [0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 1000])
def test_a_jump_leads_where_drawing_leads(before: int) -> None:
    """From the seed on, from the first and the last word of a block and in between, by less than a block and more."""
    state = after(before)
    few = [0, 1, 2, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK]
    for words in [*few, 32 * BLOCK, 33 * BLOCK + 17, 40 * BLOCK - before, 100_003]:
        assert torch.equal(advanced(state, words), after(words, state)), words
    assert torch.equal(state, after(before)), "it is another tensor"


def test_a_long_jump() -> None:
    assert torch.equal(advanced(after(5), 3_000_001), after(3_000_006))


def test_two_jumps_are_one() -> None:
    """Further than can be drawn here."""
    one, other = 10**12 + 1, 10**13 + 12345
    assert torch.equal(advanced(advanced(after(3), one), other), advanced(after(3), one + other))


def test_what_else_a_generator_knows_stays() -> None:
    generator = torch.Generator().manual_seed(7)
    torch.empty(1).normal_(generator=generator)  # it keeps a second number for the next time
    state = generator.get_state()
    assert torch.equal(advanced(state, 5000), after(5000, state))
    generator.set_state(advanced(state, 5000))
    kept = torch.empty(1).normal_(generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.empty(1).normal_(generator=generator), kept)


def test_a_generator_of_another_kind_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_advance()
    for name, value in (("SIZE", 5000), ("LEFT", 3), ("NEXT", 0), ("BLOCK", slice(2, 2 + BLOCK)), ("MIDDLE", 396)):
        with monkeypatch.context() as patch:
            for kept in (mt19937._characteristic, mt19937._multiples, mt19937._power):
                kept.cache_clear()
            patch.setattr(mt19937, name, value)
            assert not can_advance.__wrapped__(), name
    for kept in (mt19937._characteristic, mt19937._multiples, mt19937._power):
        kept.cache_clear()
    assert can_advance.__wrapped__()
