"""Memory of large results: the same tensors as torch would make, and blocks that come back when these are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from convmesh import batching
from convmesh.kernels import memory

LARGE = (memory.LARGE // 4 + 5,)
LIKE = torch.ones(1)


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch) -> memory.Shelf:
    own = memory.Shelf()
    monkeypatch.setattr(memory, "shelf", own)
    return own


def test_memory_is_used_again_once_no_tensor_needs_it(shelf: memory.Shelf) -> None:
    first = memory.new_empty(LIKE, LARGE)
    address, view = first.data_ptr(), first[3:5]
    del first
    assert shelf.kept == 0  # a view is alive
    other = memory.new_empty(LIKE, LARGE)
    assert other.data_ptr() != address
    del view
    assert shelf.kept == memory.BLOCK
    again = memory.new_empty(LIKE.double(), (LARGE[0] // 2, 1))
    assert again.data_ptr() == address
    assert shelf.kept == 0


@pytest.mark.parametrize("size", [memory.LARGE, memory.BLOCK + 4, 3 * memory.BLOCK // 2, 5 * memory.BLOCK])
def test_the_same_size_again_needs_no_new_memory(size: int, shelf: memory.Shelf) -> None:
    shape = (size // 4,)
    memory.new_empty(LIKE, shape)
    kept = shelf.kept
    memory.new_empty(LIKE, shape)
    assert shelf.kept == kept > 0


def test_a_block_that_is_much_too_large_is_left_alone(shelf: memory.Shelf) -> None:
    memory.new_empty(LIKE, (16 * LARGE[0],))
    kept = shelf.kept
    memory.new_empty(LIKE, (8 * LARGE[0],))
    assert shelf.kept > kept


def test_what_is_kept_is_bounded(shelf: memory.Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "KEPT", 3 * memory.BLOCK)
    tensors = [memory.new_empty(LIKE, LARGE) for _ in range(5)]
    tensors.clear()
    assert shelf.kept == 3 * memory.BLOCK


def test_nothing_is_kept_when_the_rules_are_taken_out(shelf: memory.Shelf) -> None:
    batching.install()
    memory.new_empty(LIKE, LARGE)
    assert shelf.kept
    batching.uninstall()
    assert shelf.kept == 0


def test_small_traced_and_other_tensors_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_new_block", lambda size: pytest.fail("asked for memory"))
    memory.new_empty(LIKE, (1000,))
    with FakeTensorMode() as mode:
        memory.new_empty(mode.from_tensor(LIKE), LARGE)
    memory.new_empty(torch.ones(1, device="meta"), LARGE)


@pytest.mark.parametrize("large_pages", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_tensors_are_what_torch_would_make(
    large_pages: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not large_pages:
        monkeypatch.setattr(memory, "HAS_LARGE_PAGES", False)
    zeros = memory.new_empty(torch.ones(1, dtype=dtype), (3, *LARGE)).zero_()
    assert (zeros.dtype, zeros.shape, zeros.is_contiguous(), type(zeros)) == (dtype, (3, *LARGE), True, Tensor)
    assert not zeros.any()
    turned = torch.randn(LARGE[0], 3).t()
    assert torch.equal(memory.contiguous(turned), turned)
    assert memory.contiguous(turned).is_contiguous()
    assert memory.contiguous(zeros) is zeros


def test_the_c_library_keeps_what_is_freed() -> None:
    """In a process of its own: another one has freed large blocks before."""
    code = """
import ctypes, torch, convmesh
class Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "parts", "small", "mapped", *"abcdef")]
heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
def mapped():
    before = heap().mapped
    block = torch.empty(16 * 2**20, dtype=torch.uint8)
    return heap().mapped > before
before = mapped()
convmesh.enable()
print(before, mapped())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("True False\n", "")
