"""The laws of the stand-in accelerator: those of a GPU that tests of this library rely on."""

from __future__ import annotations

import ctypes
import signal

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.accelerator import BACKEND
from tests.accelerator.device import take_events
from tests.accelerator.ranks import results
from tests.compare import assert_close
from tests.launch import launch


def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = F.batch_norm(F.conv2d(x, weight, padding=1), None, None, training=True)
    return F.max_pool2d(y, 2).relu().square().mean()


def computes_as_a_cpu(mesh: DeviceMesh) -> None:
    tensors = [torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)]
    on_cpu = [tensor.clone().requires_grad_() for tensor in tensors]
    on_device = [tensor.to("acc").requires_grad_() for tensor in tensors]
    network(*on_cpu).backward()
    network(*on_device).backward()
    for one, other in zip(on_device, on_cpu, strict=True):
        assert one.grad is not None
        assert one.grad.device.type == "acc"
        assert_close(one.grad.cpu(), other.grad)


def views_alias(mesh: DeviceMesh) -> None:
    x = torch.zeros(2, 3, 4, device="acc")
    view = x.transpose(1, 2)[:, 1:3]
    assert view.stride() == (12, 1, 4)
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    view.fill_(1)
    torch.view_as_complex(x.view(2, 3, 2, 2)).imag.add_(1)
    assert x.cpu()[0, 0].tolist() == [0, 2, 1, 1]
    assert torch.add(x, 1, out=torch.empty(0, device="acc")).shape == x.shape


def tensors_of_the_cpu_are_refused(mesh: DeviceMesh) -> None:
    x, w = torch.ones(1, 2, 3, 3), torch.ones(2, 2, 1, 1)
    for mixed in (lambda: x + x.to("acc"), lambda: F.conv2d(x.to("acc"), w), lambda: torch.cat([x, x.to("acc")])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (x.to("acc") * torch.tensor(2.0)).sum().item() == 36, "a number of the host's is an argument"
    assert (5 * x.to("acc") // 2).sum().item() == 36
    with pytest.raises(TypeError, match="numpy"):
        x.to("acc").numpy()


def waiting_and_copying_are_counted(mesh: DeviceMesh) -> None:
    take_events()
    x = torch.arange(6.0, device="acc").view(2, 3)
    torch.optim.SGD([x.clone().requires_grad_()], lr=0.1, momentum=0.9).step()
    assert take_events() == []
    x.sum().item(), x.nonzero(), x.cpu(), torch.tensor([1], device="acc"), x[:, [0, 2]]
    torch.accelerator.synchronize()
    assert set(take_events()) == {
        "synchronize", "aten::_local_scalar_dense", "aten::nonzero",
        "copy from device to host", "copy from host to device",
    }  # fmt: skip


def new_memory_is_nan(mesh: DeviceMesh) -> None:
    assert torch.empty(5, device="acc").isnan().all()
    assert (torch.empty(5, device="acc", dtype=torch.int64) == -1).all()


def random_numbers_are_its_own(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    here, there = torch.rand(4), torch.rand(4, device="acc")
    assert not torch.equal(here, there.cpu())
    state = torch.get_device_module("acc").get_rng_state()
    again = torch.rand(4, device="acc")
    torch.get_device_module("acc").set_rng_state(state)
    assert torch.equal(torch.rand(4, device="acc"), again)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, device="acc"), there)


def has_kernels_of_synchronised_norms(mesh: DeviceMesh) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64).requires_grad_()
    w, b = (torch.randn(3, dtype=torch.float64).requires_grad_() for _ in range(2))
    running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    y = F.batch_norm(x, *running, w, b, training=True)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    input, weight, bias, grad = (tensor.detach().to("acc") for tensor in (x, w, b, gradient))
    updated = torch.zeros(3, dtype=torch.float64, device="acc"), torch.ones(3, dtype=torch.float64, device="acc")
    parts = [torch.batch_norm_update_stats(part, None, None, 0.0) for part in (input[:1], input[1:])]
    means, stds = [mean for mean, _ in parts], [(var + 1e-5).rsqrt() for _, var in parts]
    counts = torch.tensor([25, 75], dtype=torch.float64).to("acc")
    stats = torch.stack(means), torch.stack(stds), *updated, 0.1, 1e-5, counts
    mean, invstd = torch.batch_norm_gather_stats_with_counts(input, *stats)
    sums = torch.batch_norm_backward_reduce(grad, input, mean, invstd, weight, True, True, True)
    count = counts.int()
    made = {
        "output": (torch.batch_norm_elemt(input, weight, bias, mean, invstd, 1e-5), y),
        "input": (torch.batch_norm_backward_elemt(grad, input, mean, invstd, weight, *sums[:2], count), x.grad),
        "weight": (sums[2], w.grad),
        "bias": (sums[3], b.grad),
        "running mean": (updated[0], running[0]),
        "running variance": (updated[1], running[1]),
    }
    for actual, expected in made.values():
        assert_close(actual.cpu(), expected)  # type: ignore[arg-type]


def reads_its_memory(mesh: DeviceMesh) -> None:
    ctypes.string_at(torch.ones(3, device="acc").data_ptr(), 4)


LAWS = (
    computes_as_a_cpu, views_alias, tensors_of_the_cpu_are_refused, waiting_and_copying_are_counted, new_memory_is_nan,
    random_numbers_are_its_own, has_kernels_of_synchronised_norms,
)  # fmt: skip


def check_laws(mesh: DeviceMesh) -> None:
    for law in LAWS:
        law(mesh)


def test_laws() -> None:
    results(check_laws, mesh=(1,))


def test_the_host_cannot_read_its_memory() -> None:
    (outcome,) = launch(reads_its_memory, mesh=(1,), names=("h",), backend=BACKEND)
    assert outcome.exit_code == -signal.SIGSEGV
