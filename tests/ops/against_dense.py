"""Any differentiable function on sharded tensors, forward and backward, against the same function in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

import convmesh
from tests.cases import letter, local_shape, place
from tests.compare import assert_close
from tests.gathers import Sizes, is_sent_whole

Placed = tuple[tuple[int, ...], tuple[Any, ...]]
"""A tensor's shape, and for every mesh dimension where it lies: 'R', 'P' or a tensor dimension."""


@dataclass(frozen=True)
class Sharded:
    """A module-level function of tensors (and constants), and where its tensors lie."""

    function: Callable[..., Any]
    tensors: tuple[Placed, ...]
    constants: tuple[Any, ...] = ()
    gathers: bool = False  # by decision


def numbers(case: Sharded) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape, _ in case.tensors]


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def backward(outputs: list[torch.Tensor], sizes: Sizes) -> None:
    """Give every output a gradient of numbers of its own, the same in one process and in many."""
    gradients = []
    for number, output in enumerate(outputs):
        gradient = torch.arange(output.numel(), dtype=torch.float64).add(number).sin().view(output.shape)
        if isinstance(output, DTensor):
            gradient = place(gradient, output.device_mesh, tuple(map(letter, output.placements)))
        gradients.append(gradient)
    with sizes:
        torch.autograd.backward(outputs, gradients)


def check_elements(mesh: DeviceMesh, case: Sharded) -> tuple[str, ...]:
    """`check` of a function that adds up a few terms at most: each value is compared by itself."""
    return check(mesh, case, elementwise=True)


def check(mesh: DeviceMesh, case: Sharded, elementwise: bool = False) -> tuple[str, ...]:
    """Equal to one process; returns the outputs' placements."""
    dense = [tensor.clone().requires_grad_() for tensor in numbers(case)]
    with Sizes() as one:
        expected = results(case.function(*dense, *case.constants))
    backward(expected, one)
    with convmesh.enable():
        placed = [
            place(tensor, mesh, at).requires_grad_()
            for tensor, (_, at) in zip(numbers(case), case.tensors, strict=True)
        ]
        with Sizes() as many:
            actual = results(case.function(*placed, *case.constants))
        backward(actual, many)
        outputs = [tensor.detach() for tensor in actual]
        gradients = [tensor.grad for tensor in placed]
        whole = is_sent_whole(one, many, zip(dense, (at for _, at in case.tensors), strict=True))
        assert case.gathers or not whole, f"{many.replicated_at_once} bytes at once"
        assert len(actual) == len(expected)
        for output, wanted in zip(outputs, expected, strict=True):
            compare("output", output, wanted.detach(), elementwise)
        for number, (gradient, leaf) in enumerate(zip(gradients, dense, strict=True)):
            assert (gradient is None) == (leaf.grad is None)
            if gradient is not None:
                compare(f"gradient {number}", gradient, leaf.grad, elementwise)
    return tuple(str(output.placements) for output in actual)


def compare(name: str, actual: Any, expected: Any, elementwise: bool) -> None:
    local = actual.to_local()
    wanted = local_shape(actual)
    assert local.shape == wanted, f"{name}: local shape {local.shape}, not {wanted}: {actual.placements}"
    try:
        # The terms of a pending sum may be larger than the sum.
        pending = any(isinstance(p, Partial) for p in actual.placements)
        scale = max([1.0, *expected.abs().flatten().tolist()]) if pending else None
        assert_close(actual.full_tensor(), expected, scale, elementwise)
    except AssertionError as error:
        raise AssertionError(f"{name} at {actual.placements}: {error}") from None
