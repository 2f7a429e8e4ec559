"""The compiled library is there, and is used only where it can be."""

from __future__ import annotations

import torch

from convmesh import kernels
from convmesh.kernels import library


def test_there_is_one() -> None:
    """Tests of what it computes would compare nothing without it."""
    assert kernels.available()


def test_it_takes_plain_numbers_in_memory() -> None:
    assert library.takes(torch.ones(3))
    assert library.takes(torch.ones(3).double())
    assert not library.takes(torch.ones(3).half())
    assert not library.takes(torch.ones(3, device="meta"))
    assert not library.takes(torch.ones(3).as_subclass(type("Other", (torch.Tensor,), {})))
    assert not library.takes(torch.ones(3, dtype=torch.complex64).conj().imag)  # in memory are the negatives
    assert not library.takes(torch._efficientzerotensor(3))


class Idle:
    """A library that writes nothing."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def test_one_that_is_wrong_is_noticed() -> None:
    assert not library._agrees_with_torch(Idle())


def test_a_users_modes_do_not_make_it_look_wrong() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"), torch.inference_mode():
        assert library._library.__wrapped__() is not None
