"""Norms, losses and reductions compiled, in inference mode, in half precision, and where rounding is hard."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

import convmesh
from convmesh.comm import reduce
from tests.cases import place
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool
from tests.ops.agreement import compare

aten = torch.ops.aten


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _network(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    x = F.relu(F.batch_norm(x, None, None, w, b, True))
    x = F.group_norm(x, 3, w, b) + F.instance_norm(x, None, None, w, b)
    x = F.layer_norm(x, x.shape[2:]) + F.rms_norm(x, x.shape[3:])
    loss = F.cross_entropy(x, target, w.detach().abs(), ignore_index=1) + F.mse_loss(x, x.detach() * 2)
    return loss + x.var((2, 3)).mean() + x.amax((0, 2)).sum() + F.l1_loss(x, x.detach() + 1)


def _operands() -> tuple[torch.Tensor, ...]:
    target = torch.randint(0, 6, (3, 4, 5), generator=torch.Generator().manual_seed(1))
    return numbers(3, 6, 4, 5), numbers(6, seed=1), numbers(6, seed=2), target


def _placed(mesh: DeviceMesh, at: tuple[Any, ...]) -> list[DTensor]:
    x, w, b, target = _operands()
    target_at = tuple("R" if p == 1 else p - (p > 1) if isinstance(p, int) else p for p in at)
    whole = ("R",) * len(at)
    return [
        place(x, mesh, at).requires_grad_(), place(w, mesh, whole).requires_grad_(),
        place(b, mesh, whole).requires_grad_(), place(target, mesh, target_at),
    ]  # fmt: skip


def _reference() -> tuple[torch.Tensor, list[torch.Tensor]]:
    tensors = _operands()
    for tensor in tensors[:3]:
        tensor.requires_grad_()
    loss = _network(*tensors)
    loss.backward()
    return loss, [tensor.grad for tensor in tensors[:3] if tensor.grad is not None]


def compiled(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    loss, gradients = _reference()
    with convmesh.enable():
        tensors = _placed(mesh, at)
        actual = torch.compile(_network, backend="aot_eager", fullgraph=True)(*tensors)
        actual.backward()
    compare("loss", actual, loss)
    for tensor, gradient in zip(tensors, gradients, strict=False):
        compare("gradient", tensor.grad, gradient)
    torch._dynamo.reset()


def test_under_compile(pool: Pool) -> None:
    pool.run_cases(compiled, [(3,), (1,)], mesh=(2,))


def inferred(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    loss, _ = _reference()
    for mode in (torch.no_grad, torch.inference_mode):
        with convmesh.enable(), mode():
            tensors = [tensor.detach() for tensor in _placed(mesh, at)]
            actual = _network(*tensors)
            value = actual.full_tensor()
        assert_close(value, loss)


def test_without_gradients(pool: Pool) -> None:
    pool.run_cases(inferred, [(0, 3), (1, 2)])


def fused_rms_norm(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """Below autograd, as devices have it that fuse it."""
    x, w, gy = numbers(5, 6, 7), numbers(6, 7, seed=1), numbers(5, 6, 7, seed=2)
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    expected = F.rms_norm(a, (6, 7), b)
    expected.backward(gy)
    with convmesh.enable(), torch.inference_mode():
        input, weight = place(x, mesh, at), place(w, mesh, ("R",) * len(at))
        y, rstd = aten._fused_rms_norm.default(input, [6, 7], weight, None)
        gradient = place(gy, mesh, at)
        gx, gw = aten._fused_rms_norm_backward.default(gradient, input, [6, 7], rstd, weight, [True, True])
        for name, actual, wanted in (("output", y, expected), ("input", gx, a.grad), ("weight", gw, b.grad)):
            compare(name, actual, wanted.detach())


def test_fused_rms_norm(pool: Pool) -> None:
    pool.run_cases(fused_rms_norm, [(0, 1), (1, 2), (2, 2), ("P", 2)])


def trains(mesh: DeviceMesh, momentum: float | None) -> list[torch.Tensor]:
    alone = torch.nn.BatchNorm2d(6, momentum=momentum, dtype=torch.float64)
    sharded = torch.nn.BatchNorm2d(6, momentum=momentum, dtype=torch.float64)
    sharded.load_state_dict(alone.state_dict())
    with convmesh.enable():
        distribute_module(sharded, mesh)
        for step in range(3):
            x = numbers(5, 6, 3, 5, seed=step)
            expected = alone(x)
            actual = sharded(place(x, mesh, (0, 3)))
            compare("output", actual, expected)
        with torch.inference_mode():  # statistics are also kept up where nothing is learnt
            compare("inference", sharded(place(x, mesh, (2, 0))), alone(x))
        alone.eval()
        sharded.eval()
        compare("evaluation", sharded(place(x, mesh, (3, 0))), alone(x))
    running = [sharded.running_mean.to_local(), sharded.running_var.to_local()]
    for mine, its in zip(running, (alone.running_mean, alone.running_var), strict=True):
        assert_close(mine, its)
    return running


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_running_statistics_are_the_same_on_all_ranks(pool: Pool, momentum: float | None) -> None:
    same_on_all_ranks(pool.run(trains, momentum))


def far_from_zero(mesh: DeviceMesh, few: int) -> None:
    """The mean is a million deviations: a difference of squares would have nothing left of the variance."""
    x = numbers(4, 6, 8, 8) + 1e6
    with convmesh.enable(), patch.object(reduce, "FEW_BYTES", few):
        for at in ((0,), (2,)):
            placed = place(x, mesh, at)
            # Numbers of a million have lost six digits already, of which their squares get a part.
            assert_close(placed.var((0, 2, 3)).full_tensor(), x.var((0, 2, 3)), scale=1e2)
            for function in (
                lambda t: F.batch_norm(t, None, None, None, None, True),
                lambda t: F.group_norm(t, 2),
                lambda t: F.layer_norm(t, t.shape[1:]),
            ):
                assert_close(function(placed).full_tensor(), function(x), scale=1e4)


def far_from_zero_in_float32(mesh: DeviceMesh, few: int) -> None:
    """A thousand deviations, in which one device has lost three digits of six; a rank may have nothing."""
    for rows in (8, 3):
        x = (numbers(4, 6, rows, 8) + 1e3).float()
        with convmesh.enable(), patch.object(reduce, "FEW_BYTES", few):
            var, mean = torch.var_mean(place(x, mesh, (2,)), (0, 2, 3))
        assert_close(mean.full_tensor(), x.double().mean((0, 2, 3)))
        assert_close(var.full_tensor(), x.double().var((0, 2, 3)), scale=10)


@pytest.mark.parametrize("few", [reduce.FEW_BYTES, 0])
def test_moments_are_merged_stably(pool: Pool, few: int) -> None:
    """Few are gathered, and many added up."""
    pool.run(far_from_zero, few, mesh=(4,))
    pool.run(far_from_zero_in_float32, few, mesh=(4,))


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    """As parameters of norms are, which often stay in float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


HALF: dict[str, Callable[..., torch.Tensor]] = {
    "batch norm": lambda x, w, t: F.batch_norm(x, None, None, w, w, True),
    "group norm": lambda x, w, t: F.group_norm(x, 2, w, w),
    "group norm, parameters of float32": lambda x, w, t: F.group_norm(x, 2, _wider(w), _wider(w)),
    "layer norm": lambda x, w, t: F.layer_norm(x, x.shape[1:]),
    "layer norm, parameters of float32": lambda x, w, t: F.layer_norm(x, t.shape[1:], _wider(t[0]), _wider(t[1])),
    "layer norm of rows, parameters of float32": lambda x, w, t: F.layer_norm(x.transpose(1, 3), (4,), _wider(w)),
    "mean": lambda x, w, t: (x + 3).mean((2, 3)),
    "mse": lambda x, w, t: F.mse_loss(x * 10, t),
    "var": lambda x, w, t: x.var((0, 2, 3)),
}


def half(mesh: DeviceMesh, case: tuple[str, torch.dtype]) -> None:
    """A thousand values of half precision: added up in it, their sum would stop growing, or overflow."""
    name, dtype = case
    tensors = [t.to(dtype) for t in (numbers(2, 4, 32, 32), numbers(4, seed=1), numbers(2, 4, 32, 32, seed=2))]
    exact = [t.double().requires_grad_() for t in tensors]
    expected = HALF[name](*exact)
    gradient = numbers(*expected.shape, seed=5).to(dtype)
    expected.backward(gradient.double())
    with convmesh.enable():
        placed = [place(t, mesh, (3,) if t.dim() == 4 else ("R",)).requires_grad_() for t in tensors]
        actual = HALF[name](*placed)
        actual.backward(place(gradient, mesh, ("R",) * 1))
    assert actual.dtype == dtype
    assert_close(actual.full_tensor(), expected.detach())
    assert exact[0].grad is not None
    assert placed[0].grad is not None
    # Those of parameters a kernel of torch's adds up in half precision, on one device, too.
    assert_close(placed[0].grad.full_tensor(), exact[0].grad)


def test_half_precision_accumulates_in_float32(pool: Pool) -> None:
    pool.run_cases(half, [(name, dtype) for name in HALF for dtype in (torch.bfloat16, torch.float16)], mesh=(2,))


def nan_wins(mesh: DeviceMesh) -> None:
    # Few results are compared on every rank, many on their way.
    for place_of_nan, results in product((0, 4), (3, 3000)):
        x = numbers(5, results)
        x[place_of_nan, 1] = torch.nan
        x[0, 2] = torch.inf
        with convmesh.enable():
            placed = place(x, mesh, (0,))
            assert_close(placed.amax(0).full_tensor(), x.amax(0))
            assert_close(placed.amin(0).full_tensor(), x.amin(0))
            assert placed.argmax().full_tensor() == x.argmax()
            assert_close(placed.min(0).indices.full_tensor(), x.min(0).indices)


def test_a_nan_is_the_greatest_and_the_least_value(pool: Pool) -> None:
    pool.run(nan_wins, mesh=(4,))


def gradient_of_a_mean(mesh: DeviceMesh) -> int:
    seen: list[torch.Tensor] = []
    with convmesh.enable():
        x = place(numbers(4, 100, 100), mesh, (1,)).requires_grad_()
        y = x * 2
        y.register_hook(lambda gradient: seen.append(gradient.to_local()))
        F.l1_loss(y, y.detach() + 1).backward()
        y = x * 3
        y.register_hook(lambda gradient: seen.append(gradient.to_local()))
        y.mean().backward()
    return max(tensor.untyped_storage().nbytes() for tensor in seen)


def test_the_gradient_of_a_mean_takes_no_more_than_a_shard(pool: Pool) -> None:
    assert max(pool.run(gradient_of_a_mean, mesh=(2,))) <= 4 * 100 * 100 * 8 // 2


def refused(mesh: DeviceMesh) -> None:
    x, plain = place(numbers(4, 6, 8), mesh, (2,)), numbers(6)
    with convmesh.enable():
        with pytest.raises(convmesh.ShardingError, match="a plain"):
            F.batch_norm(x, None, None, plain, None, True)
        with pytest.raises(convmesh.ShardingError, match="Partial"):
            F.batch_norm(x, place(plain, mesh, ("P",)), place(plain, mesh, ("R",)), None, None, True)
        assert F.batch_norm(x, None, None, None, None, True).placements == (Shard(2),)


def test_bad_input_is_refused_on_all_ranks(pool: Pool) -> None:
    pool.run(refused, mesh=(2,))


def outside(mesh: DeviceMesh) -> None:
    """Two of the four ranks have no part in the mesh, and run the same program."""
    small = DeviceMesh("cpu", [0, 1])
    loss, _ = _reference()
    with convmesh.enable():
        x, w, b, target = (distribute_tensor(t, small, [Shard(0) if t.dim() > 1 else Replicate()]) for t in _operands())
        tensors = [x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), target]
        x = F.relu(F.batch_norm(tensors[0], None, None, w, b, True))
        x = F.layer_norm(F.group_norm(x, 3, w, b), x.shape[2:])
        actual = F.cross_entropy(x, target) + F.mse_loss(x, x.detach() * 2) + x.var((2, 3)).mean()
        actual.backward()
    assert actual.shape == loss.shape
    assert all(t.grad is not None and t.grad.shape == t.shape for t in tensors[:3])


def test_ranks_outside_of_the_mesh_go_along(pool: Pool) -> None:
    pool.run(outside)


def any_eps(mesh: DeviceMesh, eps: float) -> None:
    x = numbers(4, 6, 8)
    x[:, :, :2] = 1.0  # nothing varies on the first rank
    with convmesh.enable():
        placed = place(x, mesh, (2,))
        for function in (lambda t: F.group_norm(t, 2, eps=eps), lambda t: F.layer_norm(t, (6, 8), eps=eps)):
            compare("output", function(placed), function(x))


def test_any_eps(pool: Pool) -> None:
    pool.run_cases(any_eps, [1e-5, 0.0, -0.01], mesh=(4,))


def negatives_in_memory(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """The imaginary part of a conjugate is a view of the negatives, which a kernel of our own would read."""
    values = torch.complex(numbers(2, 4, 6, 8), numbers(2, 4, 6, 8, seed=1) + 0.3)

    def norms(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.conj().imag
        z = y.detach().requires_grad_()
        out = F.group_norm(z, 2) + F.layer_norm(z, z.shape[1:]) + F.batch_norm(z, None, None, training=True)
        (gradient,) = torch.autograd.grad((out * z).sum(), z)
        return [F.group_norm(y, 2), F.layer_norm(y, y.shape[1:]), F.instance_norm(y), out, gradient]

    with convmesh.enable():
        for mine, wanted in zip(norms(place(values, mesh, at)), norms(values), strict=True):
            assert_close(mine.full_tensor(), wanted)


def test_negatives_in_memory(pool: Pool) -> None:
    pool.run_cases(negatives_in_memory, [(2, 3), (0, 2), (3, "R")], mesh=(2, 2))
