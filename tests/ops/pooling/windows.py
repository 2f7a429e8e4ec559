"""Runs functions of one DTensor against one process: what the tests of pooling and resampling share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes, is_sent_whole


@dataclass(frozen=True)
class Call:
    """torch.nn.functional's `function(x, *args, **kwargs)` for an `x` of `shape`.

    It lies `at` its mesh: 'R', 'P' or a dimension.
    """

    function: str
    shape: tuple[int, ...]
    at: tuple[Any, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float64
    gathers: bool = False
    gradient: tuple[Any, ...] | None = None  # None: as the output comes
    channels_last: bool = False

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        result = getattr(F, self.function)(x, *self.args, **dict(self.kwargs))
        return list(result) if isinstance(result, tuple) else [result]


PLACES: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (2,): [(2,), (-1,), (0,), ("P",), (1,)],
    (4,): [(2,), (-1,)],
    (2, 2): [(0, 2), (2, -1), (2, 2), ("P", -1)],
}


def placed_calls(mesh: tuple[int, ...], calls: Sequence[Call]) -> list[Call]:
    """Every call at two places in turn, so that all kinds of calls meet all places; -1 is the last dimension."""
    places, made = PLACES[mesh], []
    for number, call in enumerate(calls):
        for at in (places[number % len(places)], places[(number + 1) % len(places)]):
            made.append(replace(call, at=tuple(len(call.shape) - 1 if p == -1 else p for p in at)))
    return made


def letters(tensor: DTensor) -> tuple[Any, ...]:
    return tuple(p.dim if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R" for p in tensor.placements)


def check_call(mesh: DeviceMesh, call: Call) -> None:
    """Outputs and the input's gradient equal those of one process, and nothing is gathered."""
    generator = torch.Generator().manual_seed(7)
    # Few distinct values make ties, of which max pooling has to take the first.
    x = torch.randint(-9, 10, call.shape, generator=generator).to(call.dtype) / 4
    if call.channels_last:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    dense = x.clone().requires_grad_()
    with Sizes() as one:
        expected = call(dense)
    gradient = torch.randn(expected[0].shape, generator=generator, dtype=torch.float64).to(call.dtype)
    expected[0].backward(gradient)
    with convmesh.enable():
        placed = place(x, mesh, call.at).requires_grad_()
        with Sizes() as many:
            actual = call(placed)
        where = letters(actual[0])
        placed_gradient = place(gradient, mesh, call.gradient or where)
        with many:
            actual[0].backward(placed_gradient)
    assert call.gathers or not is_sent_whole(one, many, [(x, call.at)]), f"{many.replicated_at_once} bytes at once"
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        try:
            assert_close(one.full_tensor(), other.detach())
        except AssertionError as error:
            raise AssertionError(f"output {number}: {error}") from None
    for kept, wanted in zip(call.at, where, strict=True):
        assert call.gathers or not isinstance(kept, int) or kept == wanted, f"{call.at} became {where}"
    assert placed.grad is not None
    assert dense.grad is not None
    assert_close(placed.grad.full_tensor(), dense.grad)
    inference(mesh, call, x, expected)


def inference(mesh: DeviceMesh, call: Call, x: torch.Tensor, expected: Sequence[torch.Tensor]) -> None:
    with convmesh.enable(), torch.inference_mode():
        actual = call(place(x, mesh, call.at))
        assert_close(actual[0].full_tensor(), expected[0].detach())
