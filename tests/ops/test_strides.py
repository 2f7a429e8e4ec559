"""Tensors look as one device's would, whole and in parts."""

from __future__ import annotations

import warnings
from itertools import product

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.ops.elementwise.pointwise import OPERATORS
from convmesh.strides import dense_stride, format_of, usual
from tests.cases import place
from tests.conformance_verdict import load
from tests.harness import Pool
from tests.opinfo import FAMILIES, cases
from tests.ops.strided import LAID, Lies, compare_all


@pytest.mark.parametrize("family", FAMILIES)
def test_results_have_the_strides_of_one_device(pool: Pool, family: str) -> None:
    """Of PyTorch's own samples, each in some of the ways in which it may lie in memory: an operator sees all ways."""
    ways = list(LAID)
    batch = [(case, FAMILIES[family].alone, ways[n % len(ways)]) for n, case in enumerate(cases(family, 2))]
    pool.run(load, mesh=(2,))
    pool.run(compare_all, batch, mesh=(2,), timeout=300)


@pytest.mark.parametrize("family", FAMILIES)
def test_local_tensors_may_have_odd_strides(pool: Pool, family: str) -> None:
    """Operands and gradients whose local tensors lie otherwise than the global ones, with strides that say nothing."""
    ways = ("contiguous", "channels last")
    batch = [(case, FAMILIES[family].alone, ways[n % 2], True) for n, case in enumerate(cases(family, 1))]
    pool.run(load, mesh=(4,))
    pool.run(compare_all, batch, mesh=(4,), timeout=300)


@pytest.mark.parametrize(
    ("shape", "stride", "whole", "expected"),
    [
        # One sample of a batch whose channels lie last, which came from a view.
        ((1, 4, 2, 2), (4, 1, 8, 4), (16, 1, 8, 4), (16, 1, 8, 4)),
        # A format that the part has and the whole has not.
        ((1, 3, 1, 3, 4), (12, 1, 12, 12, 3), (12, 1, 12, 24, 3), (36, 1, 36, 12, 3)),
        # One channel: the format of the whole.
        ((2, 1, 3, 3), (9, 5, 3, 1), (18, 1, 6, 2), (9, 1, 3, 1)),
        ((2, 1, 3, 3), (9, 5, 3, 1), (18, 9, 3, 1), (9, 9, 3, 1)),
        # With gaps, and nothing at all.
        ((3, 1, 2), (10, 1, 2), (20, 4, 2), (10, 4, 2)),
        ((0, 3), (1, 1), (3, 1), (3, 1)),
    ],
)
def test_strides_of_dimensions_of_size_1(
    shape: tuple[int, ...], stride: tuple[int, ...], whole: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    local = torch.arange(100.0).as_strided(shape, stride)
    found = usual(local, whole)
    assert found.stride() == expected
    assert found.data_ptr() == local.data_ptr()
    assert torch.equal(found, local)
    assert usual(found, whole) is found


def test_formats() -> None:
    assert dense_stride((2, 3, 4, 5), torch.channels_last) == (60, 1, 15, 3)
    assert dense_stride((2, 0, 4), torch.contiguous_format) == (4, 4, 1)
    assert format_of((2, 3, 4, 5), (60, 1, 15, 3)) == torch.channels_last
    assert format_of((2, 3, 4, 5), (60, 20, 1, 4)) is None


def elementwise_strides(mesh: DeviceMesh) -> int:
    """Operators of up to three tensors, each of which lies in its own way; how many calls were compared."""
    shape, compared = (2, 3, 4, 5), 0
    with convmesh.enable(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in OPERATORS:
            count = sum(str(argument.type) == "Tensor" for argument in operator._schema.arguments)
            if operator._schema.is_mutable or len(operator._schema.arguments) > count + 2 or count > 3:
                continue
            for ways in product(("contiguous", "reversed", "channels last with gaps"), repeat=count):
                dense = [LAID[way](torch.rand(shape).sub_(0.5)) for way in ways]
                try:
                    expected = operator(*dense)
                except (RuntimeError, NotImplementedError):
                    break  # it takes numbers, too, or no fractions
                placed = [LAID[way](place(t.contiguous(), mesh, (2,))) for way, t in zip(ways, dense, strict=True)]
                actual = operator(*placed)
                assert Lies.of(actual) == Lies.of(expected), (operator, ways, actual.stride(), expected.stride())
                torch.testing.assert_close(actual.full_tensor(), expected, equal_nan=True)
                compared += 1
    return compared


def test_elementwise_results_have_the_strides_of_one_device(pool: Pool) -> None:
    assert min(pool.run(elementwise_strides, mesh=(2,))) > 400


def write_over_itself(mesh: DeviceMesh) -> None:
    with convmesh.enable():
        for shape in ((1, 9), (9, 1), (1, 1, 9), (3, 1, 5, 1)):
            dim = max(range(len(shape)), key=lambda dim: shape[dim])
            tensor = place(torch.randn(shape), mesh, (dim,))
            before = tensor.full_tensor()
            tensor.copy_(tensor.detach())
            tensor.copy_(tensor.view(shape))
            assert torch.equal(tensor.full_tensor(), before)


def test_a_tensor_is_written_over_itself(pool: Pool) -> None:
    """As `model.load_state_dict(model.state_dict())` does: views of one part have the same strides, whoever looks."""
    pool.run(write_over_itself, mesh=(2,))
