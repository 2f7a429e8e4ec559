"""A distributed model beside what people use with their models: the results stay those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import convmesh
from tests.compare import assert_close
from tests.harness import Pool

STEPS = 3
NAMES = ("data", "h", "w")
DIMS = {"data": 0, "h": 2, "w": 3}


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm = nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = F.gelu(self.norm(self.conv(x)))
        return y


class Net(nn.Module):
    """Down, up with a skip, and a head: what segmentation networks consist of."""

    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.first, self.down = Block(3, 4, 1), Block(4, 8, 2)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.head = nn.Conv2d(8, 2, 1)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        y: torch.Tensor = self.head(torch.cat([first, self.up(self.down(first))], 1))
        return y


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 3, 10, 12, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(2, (4, 10, 12), generator=generator)


def place(x: torch.Tensor, target: torch.Tensor, mesh: DeviceMesh | None) -> tuple[torch.Tensor, torch.Tensor]:
    if mesh is None:
        return x, target
    dims = {name: dim for name, dim in DIMS.items() if name in (mesh.mesh_dim_names or ())}
    labels = {name: max(0, dim - 1) for name, dim in dims.items()}
    return convmesh.shard(x, mesh, **dims), convmesh.shard(target, mesh, **labels)


def model_on(mesh: DeviceMesh | None, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(0)
    model = Net(**options).to(dtype)
    return model if mesh is None else convmesh.distribute(model, mesh)


def compare(model: nn.Module, expected: nn.Module, scale: float | None = None) -> None:
    for (name, actual), wanted in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        try:
            assert_close(actual.full_tensor() if isinstance(actual, DTensor) else actual, wanted, scale)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


Run = Callable[[DeviceMesh | None], nn.Module]


def loop(model: nn.Module, mesh: DeviceMesh | None, run: Any = None, after: Callable[[], None] | None = None) -> None:
    """Steps of AdamW; `run` is what is called instead of the model, and `after` follows every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, target = place(*batch(step, next(model.parameters()).dtype), mesh)
        optimizer.zero_grad()
        F.cross_entropy((model if run is None else run)(x), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if after is not None:
            after()


def clipped(mesh: DeviceMesh | None) -> nn.Module:
    model = model_on(mesh)
    loop(model, mesh)
    return model


def recomputed(mesh: DeviceMesh | None) -> nn.Module:
    model = model_on(mesh, checkpointed=True)
    loop(model, mesh)
    return model


def compiled(mesh: DeviceMesh | None) -> nn.Module:
    model = model_on(mesh)
    loop(model, mesh, None if mesh is None else torch.compile(model, backend="aot_eager", fullgraph=True))
    return model


def channels_last(mesh: DeviceMesh | None) -> nn.Module:
    model = model_on(mesh).to(memory_format=torch.channels_last)
    loop(model, mesh, lambda x: model(x.to(memory_format=torch.channels_last)))
    return model


def averaged(mesh: DeviceMesh | None) -> nn.Module:
    """An exponential moving average, and that it is used for evaluation."""
    model = model_on(mesh)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    loop(model, mesh, after=lambda: average.update_parameters(model))
    x, _ = place(*batch(9, torch.float64), mesh)
    with torch.no_grad():
        y = average.module(x)
    average.register_buffer("evaluated", y.full_tensor() if isinstance(y, DTensor) else y)
    return average


EXACT: dict[str, Run] = {run.__name__: run for run in (clipped, recomputed, compiled, channels_last, averaged)}


def check(mesh: DeviceMesh, name: str) -> None:
    expected = EXACT[name](None)
    with convmesh.enable():
        compare(EXACT[name](mesh), expected)


@pytest.mark.parametrize("mesh", [(2, 2), (1, 2, 2)])
def test_training_goes_as_on_one_process(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check, list(EXACT), mesh=mesh, names=NAMES[-len(mesh) :] if len(mesh) == 3 else ("data", "w"))


def mixed_precision(mesh: DeviceMesh | None, dtype: torch.dtype) -> tuple[nn.Module, float]:
    """autocast and GradScaler; the third batch overflows, and its step is skipped."""
    model = model_on(mesh, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for step in range(STEPS):
        x, target = place(*batch(step, torch.float32), mesh)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
            loss = F.cross_entropy(model(x * (1e30 if step == 2 else 1)).float(), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler.get_scale()


def check_mixed(mesh: DeviceMesh, dtype: torch.dtype) -> None:
    expected, expected_scale = mixed_precision(None, dtype)
    with convmesh.enable():
        model, scale = mixed_precision(mesh, dtype)
    assert scale == expected_scale == 2.0**10 * 2 * 2 / 2
    if dtype == torch.float32:
        compare(model, expected)
        return
    for actual, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        # Gradients are sums of terms that were rounded to bfloat16's 3 digits, in another order on each layout; they
        # were clipped to norm 0.5 and scaled by 0.05 twice.
        assert (actual.to_local() - wanted).abs().max() < 2 * 0.05 * 0.5 * 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_grad_scaler(pool: Pool, dtype: torch.dtype) -> None:
    pool.run(check_mixed, dtype, mesh=(2, 2), names=("data", "w"))


def check_fsdp(mesh: DeviceMesh) -> None:
    """Parameters and optimizer sharded over "data" by FSDP2, each of its ranks with its own samples; space by us."""
    expected = model_on(None)
    loop(expected, None)
    with convmesh.enable():
        space = mesh["w"]
        model = convmesh.distribute(model_on(None), space)
        for part in (model.first, model.down, model):
            fully_shard(part, mesh=mesh["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        here, parts = mesh.get_local_rank("data"), mesh["data"].size()
        for step in range(STEPS):
            x, target = (tensor.chunk(parts)[here] for tensor in batch(step, torch.float64))
            optimizer.zero_grad()
            F.cross_entropy(model(convmesh.shard(x, space, w=3)), convmesh.shard(target, space, w=2)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        weight = model.down.conv.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().numel() == weight.numel() // 2
        compare(model, expected)


def test_fsdp_over_data_and_convmesh_over_space(pool: Pool) -> None:
    pool.run(check_fsdp, mesh=(2, 2), names=("data", "w"))
