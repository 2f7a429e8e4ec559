"""Weight gradients of 3-d convolutions plane by plane."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from convmesh.geometry import Convolution
from convmesh.kernels import weight_gradient
from tests.cases import Case, check, random_case
from tests.compare import assert_close
from tests.harness import Pool


@pytest.mark.parametrize("depth", [1, 2, 8, 19])
@pytest.mark.parametrize(("kernel", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (3, 1, 1), (3, 2, 2), (5, 4, 1)])
def test_every_tap_is_a_sum_over_planes(depth: int, kernel: int, padding: int, dilation: int) -> None:
    torch.manual_seed(0)
    conv = Convolution((1, 2, 1), (padding, 1, 0), (dilation, 1, 2), False, (0, 0, 0), 1)
    fine = torch.randn(2, 3, depth, 6, 7, dtype=torch.float64)
    weight = torch.randn(4, 3, kernel, 3, 2, dtype=torch.float64, requires_grad=True)
    response = torch.convolution(fine, weight, None, *conv.arguments)
    coarse = torch.randn_like(response)
    (expected,) = torch.autograd.grad(response, weight, coarse)
    assert_close(weight_gradient.by_planes(fine, coarse, weight.detach(), conv), expected)


def by_planes(mesh: DeviceMesh, case: Case) -> None:
    """However small it is, and whatever the processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gradient, "FEWEST_CHANNELS", 1)
        patch.setattr(weight_gradient, "FEWEST_VALUES", 1)
        patch.setattr(weight_gradient, "_slow_in_3d", lambda: True)
        check(mesh, case)


def volumes(seed: int, mesh: tuple[int, ...]) -> Case:
    case = random_case(next(at for at in range(1000 * seed, 1000 * (seed + 1)) if len(random_case(at).size) == 3), mesh)
    return replace(
        case, groups=1, size=(9, 6, 7), kernel=(3, 2, 3), stride=(1, *case.stride[1:]), padding=(1, 1, 2),
        dilation=(case.dilation[0], 1, 1), output_padding=(0, 0, 0), dtype=torch.float32, channels_last=False,
    )  # fmt: skip


def test_sharded(pool: Pool) -> None:
    for mesh, seeds in (((2,), range(20, 27)), ((2, 2), range(27, 34))):
        pool.run_cases(by_planes, [volumes(seed, mesh) for seed in seeds], mesh=mesh)
