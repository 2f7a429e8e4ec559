"""Running a function on DTensors and on plain tensors, forward and backward, and comparing all that comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.cases import local_shape, place
from tests.compare import assert_close
from tests.gathers import Sizes, is_sent_whole

At = tuple[Any, ...]  # placements by mesh dimension: a dimension, "R" or "P"


@dataclass(frozen=True)
class Sample:
    """Operands by position, where they lie, and which of them need gradients."""

    tensors: Sequence[torch.Tensor | None]
    at: Sequence[At]
    needs: Sequence[bool]


def agree(
    mesh: DeviceMesh, function: Callable[..., Any], sample: Sample, scale: float | None = None
) -> Mapping[str, int]:
    """`function` of the sample on the mesh equals that on one process; returns the collectives it took, by name.

    No activation is gathered: stock operators may gather small results.
    """
    plain = [_leaf(t, needed) for t, needed in zip(sample.tensors, sample.needs, strict=True)]
    with Sizes() as one:
        expected = _outputs(function(*plain))
    gradients = [_gradient(number, output) for number, output in enumerate(expected)]
    with one:
        _backward(expected, gradients)
    with convmesh.enable():
        leaves = [
            None if t is None else place(t, mesh, at).requires_grad_(needed)
            for t, at, needed in zip(sample.tensors, sample.at, sample.needs, strict=True)
        ]
        with CommDebugMode() as communication, Sizes() as many:
            actual = _outputs(function(*leaves))
        seeds = [g if g is None else place(g, mesh, _like(y)) for g, y in zip(gradients, actual, strict=True)]
        with communication, many:
            _backward(actual, seeds)
    taken = {str(name).split(".")[-1]: count for name, count in communication.get_comm_counts().items()}
    assert len(actual) == len(expected)
    for number, (y, wanted) in enumerate(zip(actual, expected, strict=True)):
        compare(f"output {number}", y, wanted, scale)
    for number, (leaf, wanted) in enumerate(zip(leaves, plain, strict=True)):
        if leaf is not None and wanted is not None and sample.needs[number]:
            assert (leaf.grad is None) == (wanted.grad is None), f"gradient {number}"
            if wanted.grad is not None:
                compare(f"gradient {number}", leaf.grad, wanted.grad, scale)
    assert not is_sent_whole(one, many, zip(sample.tensors, sample.at, strict=True)), many.replicated_at_once
    return taken


def compare(name: str, actual: Any, expected: torch.Tensor, scale: float | None = None) -> None:
    assert isinstance(actual, DTensor), f"{name} is {type(actual)}"
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, expected {expected.dtype}"
    try:
        shape = local_shape(actual)
        assert actual.to_local().shape == shape, f"local shape {actual.to_local().shape}, expected {shape}"
        assert_close(actual.detach().full_tensor(), expected.detach(), scale)
    except AssertionError as error:
        raise AssertionError(f"{name} at {actual.placements}: {error}") from None


def _leaf(tensor: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone().requires_grad_(needed)


def _outputs(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


def _gradient(number: int, output: torch.Tensor) -> torch.Tensor | None:
    if not output.requires_grad:
        return None
    generator = torch.Generator().manual_seed(1000 + number)
    return torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None]
    if pairs:
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])


def _like(tensor: torch.Tensor) -> At:
    assert isinstance(tensor, DTensor)
    return tuple(p.dim if isinstance(p, Shard) else "P" if isinstance(p, Partial) else "R" for p in tensor.placements)
