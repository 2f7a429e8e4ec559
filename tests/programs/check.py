"""Running a program on a mesh and in one process, and comparing values, strides and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.cases import local_shape, place
from tests.compare import assert_close
from tests.ops.strided import Lies
from tests.programs.program import Program


def largest(values: torch.Tensor) -> float:
    """Of their absolute values, and 1."""
    return max([1.0, *values.detach().abs().flatten().tolist()])


def gradients(
    outputs: list[torch.Tensor],
    leaves: list[torch.Tensor],
    twice: bool = False,
    keep: bool = False,
    scales: Sequence[float] | None = None,
) -> list[Any]:
    """With those of their squares, if `twice`; and what they were derived from can be derived again, if `keep`.

    Each output is divided by its scale: the sine of a large number has its rounding error, as often as it is large.
    """
    scaled = zip(outputs, map(largest, outputs) if scales is None else scales, strict=True)
    heads = [(output / scale).sin().sum() for output, scale in scaled if output.requires_grad]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    if not heads:
        return []
    found = list(torch.autograd.grad(heads, asked, allow_unused=True, create_graph=twice, retain_graph=keep or twice))
    squares = [one.square().sum() for one in found if one is not None and one.requires_grad] if twice else []
    return [*found, *torch.autograd.grad(squares, asked, allow_unused=True)] if squares else found


def check(mesh: DeviceMesh, case: tuple[Program, str]) -> None:
    """The program on the mesh, eager, compiled or in inference mode, against one process: all values and gradients,
    those of gradients too if `twice`."""
    program, mode = case
    function = program.function(mode)
    try:
        expected, wanted = _one_process(program, function, mode == "twice")
    except RuntimeError:  # not every operator can be derived twice, on one device either
        mode = "eager"
        expected, wanted = _one_process(program, function, False)
    with convmesh.enable():
        placed = [place(leaf.values(), mesh, leaf.at).requires_grad_(leaf.kind == "numbers") for leaf in program.leaves]
        with torch.inference_mode(mode == "inference"):
            torch._dynamo.reset()
            if mode == "compiled":
                function = torch.compile(function, fullgraph=True, backend="aot_eager")
            actual = function(*placed)
        scales = [largest(one) for one in expected]
        found = gradients(actual, placed, mode == "twice", scales=scales) if mode != "inference" else wanted
        for line, one, other in zip(program.lines, actual, expected, strict=True):
            assert Lies.of(one) == Lies.of(other), f"strides {one.stride()}, on one device {other.stride()}: {line}"
        for one, other in zip([*actual, *found], [*expected, *wanted], strict=True):
            _compare(one, other)


def _one_process(program: Program, function: Callable[..., Any], twice: bool) -> tuple[list[torch.Tensor], list[Any]]:
    dense = [leaf.values().requires_grad_(leaf.kind == "numbers") for leaf in program.leaves]
    expected = function(*dense)
    return expected, gradients(expected, dense, twice)


def _compare(actual: Any, expected: Any) -> None:
    if actual is None or expected is None:
        assert not any(value is not None and value.abs().sum() for value in (actual, expected))
        return
    if isinstance(actual, DTensor):
        assert actual.to_local().shape == local_shape(actual), f"{actual.to_local().shape} at {actual.placements}"
        actual = actual.detach().full_tensor()
    assert_close(actual, expected, largest(expected))
