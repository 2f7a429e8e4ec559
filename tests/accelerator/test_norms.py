"""Training batch norms on the stand-in accelerator go by the kernels of synchronised norms, where these are right."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import convmesh
from convmesh.comm import reduce
from tests.accelerator.ranks import results
from tests.cases import place, places_of
from tests.compare import assert_close

FORWARD = {"batch_norm_update_stats", "batch_norm_gather_stats_with_counts", "batch_norm_elemt"}
BACKWARD = {"batch_norm_backward_reduce", "batch_norm_backward_elemt"}


class Case(NamedTuple):
    shape: tuple[int, ...]
    at: tuple[Any, ...]  # the input's placements, by mesh dimension
    dtype: torch.dtype = torch.float64
    parameters: torch.dtype | None = torch.float64
    running: torch.dtype | None = torch.float64
    channels_last: bool = False
    few: bool = True  # numbers, which are gathered; else they are added up
    kernels: set[str] = FORWARD | BACKWARD


CASES = {
    "space": Case((2, 3, 7, 6), (2,)),
    "a rank that has nothing": Case((2, 3, 1, 6), (2,)),
    "batch": Case((3, 4, 5), (0,)),
    "channels": Case((2, 5, 4, 4), (1,)),
    "replicated": Case((2, 5, 4, 4), ("R",)),
    "channels last": Case((2, 3, 7, 6), (3,), channels_last=True),
    "channels last in 3-d": Case((2, 3, 4, 5, 6), (4,), channels_last=True),
    "no parameters, nothing kept": Case((2, 3, 7, 6), (2,), parameters=None, running=None),
    "running statistics that the kernels cannot count in": Case(
        (2, 3, 32, 32), (2,), torch.bfloat16, torch.bfloat16, torch.bfloat16,
        kernels=BACKWARD | {"batch_norm_update_stats"},
    ),
    "half precision": Case((2, 3, 32, 32), (2,), torch.bfloat16, torch.bfloat16, torch.float32),
    "half precision with float32 beside it": Case((2, 3, 32, 32), (2,), torch.float16, torch.float32, torch.float32),
    "many": Case((2, 3, 7, 6), (2,), few=False),
    "many, a rank that has nothing": Case((2, 3, 1, 6), (2,), torch.float32, torch.float32, torch.float32, few=False),
    "one value": Case((1, 3, 1, 1), (2,), kernels={"batch_norm_update_stats", "batch_norm_backward_reduce"}),
}  # fmt: skip


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


def tensors(case: Case, device: str) -> tuple[torch.Tensor, list[torch.Tensor | None], torch.Tensor]:
    """(input, running mean and variance, weight and bias), gradient"""
    generator = torch.Generator().manual_seed(2)

    def made(*shape: int, dtype: torch.dtype | None = case.dtype) -> Any:
        numbers = torch.rand(shape, dtype=torch.float64, generator=generator)
        return None if dtype is None else numbers.to(device, dtype)

    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(case.shape), torch.contiguous_format)
    memory = last if case.channels_last else torch.contiguous_format
    x, gradient = (made(*case.shape).contiguous(memory_format=memory) for _ in range(2))
    kinds = (case.running, case.running, case.parameters, case.parameters)
    return x, [made(case.shape[1], dtype=dtype) for dtype in kinds], gradient


def agree(mesh: DeviceMesh, case: Case) -> None:
    """With one process on a CPU, in float64."""
    exact, by_channel, gradient = tensors(case, "cpu")
    exact = exact.double().requires_grad_()
    kept = [None if t is None else t.double() for t in by_channel]
    leaves = [exact, *[t.requires_grad_() for t in kept[2:] if t is not None]]
    ops = torch.ops.aten
    expected = ops.native_batch_norm(exact, *kept[2:], *kept[:2], True, 0.3, 1e-3)[0]
    wanted = torch.autograd.grad(expected, leaves, gradient.double())
    x, by_channel, gradient = tensors(case, mesh.device_type)
    where = ("R",) * mesh.ndim
    with convmesh.enable(), patch.object(reduce, "FEW_BYTES", reduce.FEW_BYTES if case.few else 0), Seen() as seen:
        x = place(x, mesh, case.at).requires_grad_()
        placed: list[Any] = [None if t is None else place(t, mesh, where) for t in by_channel]
        leaves = [x, *[t.requires_grad_() for t in placed[2:] if t is not None]]
        actual: Any = ops.native_batch_norm(x, *placed[2:], *placed[:2], True, 0.3, 1e-3)[0]
        gradients = torch.autograd.grad(actual, leaves, place(gradient, mesh, places_of(actual)))
    # Who has nothing of the input calls the one that merges, and no other.
    merging = {"batch_norm_gather_stats_with_counts"}
    expected_calls = case.kernels if x.to_local().numel() else case.kernels & merging  # type: ignore[attr-defined]
    assert set(seen.calls) & (FORWARD | BACKWARD) == expected_calls
    compared = zip((actual, *gradients, *placed[:2]), (expected, *wanted, *kept[:2]), strict=True)
    for mine, one in compared:
        if one is not None:
            scale = max(1.0, one.abs().max().item())  # a gradient may be nothing but rounding
            assert_close(mine.detach().full_tensor().cpu(), one.detach().to(mine.dtype), scale)


def failures(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    for name, case in CASES.items():
        try:
            agree(mesh, case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_norms_agree_with_one_process() -> None:
    for found in results(failures, mesh=(2,)):
        assert not found


def the_same_bits(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Of running statistics that ranks gather, or add up, over 2 x 2 ranks."""
    made = []
    for few in (reduce.FEW_BYTES, 0):
        x = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0)).mul_(3).add_(1000).to("acc")
        model = torch.nn.BatchNorm2d(3).to("acc")
        with patch.object(reduce, "FEW_BYTES", few), convmesh.enable():
            model = convmesh.distribute(model, mesh)
            y = F.relu(model(convmesh.shard(x, mesh, h=2, w=3)))
        assert isinstance(y, DTensor)
        made += [t.to_local().cpu() for t in (model.running_mean, model.running_var)]  # type: ignore[union-attr]
        x = x.cpu().double()
        assert_close(made[-2], x.mean((0, 2, 3)) / 10, scale=1e3)
        assert_close(made[-1], 0.9 + x.var((0, 2, 3)) / 10, scale=10)
    return made


def test_all_ranks_have_the_same_bits() -> None:
    first, *others = results(the_same_bits, mesh=(2, 2))
    for other in others:
        assert all(map(torch.equal, first, other))
