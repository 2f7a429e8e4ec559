"""Results in large pages: the same tensors, and advice for whole pages of their own memory alone."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from convmesh.batching import memory

LARGE = (memory.LARGE // 4 + 5,)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The intervals of addresses for which large pages were asked."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        memory, "_madvise", lambda start, size, _: asked.append((start.value, start.value + size.value))
    )
    return asked


def test_advice_is_for_whole_pages_within_the_tensor(advised: list[tuple[int, int]]) -> None:
    made = memory.new_empty(torch.ones(1), LARGE)
    ((start, stop),) = advised
    assert made.data_ptr() <= start < stop <= made.data_ptr() + made.nbytes
    assert start % memory.PAGE == stop % memory.PAGE == 0
    assert stop - start > made.nbytes - 2 * memory.PAGE


def test_small_and_traced_tensors_get_none(advised: list[tuple[int, int]]) -> None:
    memory.new_empty(torch.ones(1), (1000,))
    with FakeTensorMode():
        memory.new_empty(torch.ones(1), LARGE)
    memory.new_empty(torch.ones(1, device="meta"), LARGE)
    assert advised == []


@pytest.mark.parametrize("madvise", [memory._madvise, None])
def test_tensors_are_what_torch_would_make(madvise: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", madvise)
    like = torch.ones(1, dtype=torch.float64)
    zeros = memory.new_zeros(like, (3, *LARGE))
    assert (zeros.dtype, zeros.shape, zeros.is_contiguous()) == (torch.float64, (3, *LARGE), True)
    assert not zeros.any()
    turned = torch.randn(LARGE[0], 3).t()
    assert torch.equal(memory.contiguous(turned), turned)
    assert memory.contiguous(turned).is_contiguous()
    assert memory.contiguous(zeros) is zeros
