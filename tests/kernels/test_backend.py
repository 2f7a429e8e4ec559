"""Rules compute through kernels: by torch's operators, unless the tensors' device has a faster way. They never ask
for a device themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import convmesh.ops
from convmesh.geometry import Convolution
from convmesh.kernels import convolution, normalization, pooling, synchronous, weight_gradient
from convmesh.kernels.backend import Kernel
from tests.compare import assert_close


def test_the_first_way_that_takes_a_tensor_computes_it() -> None:
    @Kernel
    def name(x: torch.Tensor, low: bool) -> str:
        """Of what computes."""
        return "torch"

    name.on("cpu", when=lambda x, low: x.numel() > 3)(lambda x, low: "for many")
    name.on("cpu", when=lambda x, low: low)(lambda x, low: "for low ones")
    assert name(torch.ones(4), True) == "for many"
    assert name(torch.ones(3), low=True) == "for low ones"
    assert name(torch.ones(3), False) == name(torch.ones(4, device="meta"), True) == "torch"
    assert name.faster(torch.ones(3), False) is None
    assert name.__doc__ == "Of what computes."


def test_values_of_tensors_that_are_not_there_are_not_read() -> None:
    assert synchronous(torch.ones(3))
    assert not synchronous(torch.ones(3, device="meta"))


def test_no_rule_asks_for_a_device() -> None:
    asking = re.compile(r"\.is_(cpu|cuda|meta)\b|device(_type|\.type) (==|!=|in|not in) (?!kernels\.COMPILED_FOR)")
    files = sorted(Path(convmesh.ops.__file__).parent.rglob("*.py"))
    assert len(files) > 90
    assert [file.name for file in files if asking.search(file.read_text())] == []


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).add_(0.5)


X, GY, MEAN, VAR = numbers(2, 6, 16, 40), numbers(2, 6, 16, 40, seed=1), numbers(6, seed=2), numbers(6, seed=3).square()
LARGE = numbers(2, 6, 32, 80)
BY_SET = [numbers(2, 6, 1, 1, seed=seed) for seed in range(4, 8)]
STRIDED = Convolution((2, 3), (0, 0), (1, 1), False, (0, 0), 1)
DEPTHWISE = Convolution((1, 2), (2, 1), (1, 1), False, (0, 0), 6)
FASTER = {
    "moments of sets": (normalization.moments_of_sets, X, 12),
    "moments of groups": (normalization.moments_of_groups, X.contiguous(memory_format=torch.channels_last), 3),
    "moments of channels": (normalization.moments_of_channels, X),
    "normalised": (normalization.normalised, X, (BY_SET[0], BY_SET[1].square()), 1e-3, BY_SET[2], BY_SET[3]),
    "sums by set": (normalization.sums_by_set, GY, X, BY_SET[0], BY_SET[1]),
    "sums of channels": (normalization.wide_sums_of_channels, GY, X, MEAN, VAR),
    "combined": (normalization.combined, X, *BY_SET[:3], GY, BY_SET[3]),
    "max pool": (
        pooling.max_pool, numbers(2, 8, 64, 64), torch.ops.aten.max_pool2d_with_indices.default, [3, 3], [2, 2], [1, 1],
    ),
    "quotient": (pooling.quotient, torch.arange(1000), 7),
    "convolution that skips": (convolution.convolution, LARGE, numbers(4, 6, 1, 1), numbers(4), STRIDED),
    "its gradients": (
        convolution.convolution_backward,
        *(numbers(2, 4, 16, 27), LARGE, numbers(4, 6, 1, 1), STRIDED, [True, True, True]),
    ),
    "depthwise": (weight_gradient.weight_gradient, X, numbers(2, 6, 15, 19), numbers(6, 1, 6, 5), DEPTHWISE),
}  # fmt: skip


@pytest.mark.parametrize("name", FASTER)
def test_faster_ways_compute_what_torchs_operators_do(name: str) -> None:
    kernel, *arguments = FASTER[name]
    assert kernel.faster(*arguments) is not None
    found, expected = kernel(*arguments), kernel.__wrapped__(*arguments)
    for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True):
        assert_close(one, other, scale=float(other.abs().max()))
