"""A training that is saved on one mesh and goes on on another is the training that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import convmesh
from tests.compare import assert_close
from tests.harness import Pool

STEPS = 6
DIMS = {"h": 2, "w": 3}


def network() -> nn.Module:
    """With dropout, which draws random numbers, running averages, and a parameter that gets no gradient."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(4, 2, 3, stride=2),
    )  # fmt: skip
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.double()


class Training:
    """Everything that a checkpoint has to bring back."""

    def __init__(self, mesh: DeviceMesh | None, seed: int = 0):
        torch.manual_seed(seed)
        self.mesh = mesh
        self.model = network() if mesh is None else convmesh.distribute(network(), mesh)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        head, rest = [self.model[4].weight, self.model[4].bias], [self.model[0].weight, *self.model[1].parameters()]
        self.optimizer = torch.optim.AdamW([{"params": head, "lr": 0.02}, {"params": [*rest, self.model.unused]}], 0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(3, 2, 9, 10, dtype=torch.float64, generator=generator)
        named = [] if self.mesh is None else self.mesh.mesh_dim_names or ()
        x = x if self.mesh is None else convmesh.shard(x, self.mesh, **{name: DIMS[name] for name in named})
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        return whole(loss).item()

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        return convmesh.save_checkpoint(
            folder, self.model, self.optimizer, step=step, scheduler=self.scheduler, average=self.average,
            note={"steps done": step}, **options,
        )  # fmt: skip

    def load(self, folder: Path, **options: Any) -> Any:
        return convmesh.load_checkpoint(
            folder, self.model, self.optimizer, scheduler=self.scheduler, average=self.average, **options
        )

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {**self.model.state_dict(), **{f"average {k}": v for k, v in self.average.state_dict().items()}}
        return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(mesh: DeviceMesh | None, folder: Path, begin: int, end: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """From the last checkpoint, if there should be one, to another."""
    training = Training(mesh, seed=begin)  # another start each time, which loading has to replace
    if begin:
        found = training.load(folder)
        assert (found.step, found.extra) == (begin, {"note": {"steps done": begin}})
        assert len(training.optimizer.state) == 5  # not of the parameter that has no gradient
    losses = [training.step(number) for number in range(begin, end)]
    training.save(folder, end)
    return losses, training.state()


def test_training_goes_on_in_another_number_of_processes(pool: Pool, tmp_path: Path) -> None:
    straight, expected = train(None, tmp_path / "one", 0, STEPS)
    losses, folder = [], tmp_path / "many"
    for mesh, names, begin, end in (((2, 2), ("h", "w"), 0, 2), ((2,), ("w",), 2, 4)):
        results = pool.run(train, folder, begin, end, mesh=mesh, names=names, timeout=60)
        losses += results[0][0]
    after, state = train(None, folder, 4, STEPS)
    assert_close(torch.tensor([*losses, *after]).double(), torch.tensor(straight).double())
    assert state.keys() == expected.keys()
    for name in state:
        assert_close(state[name], expected[name])


def test_and_from_one_process_to_many(pool: Pool, tmp_path: Path) -> None:
    straight, expected = train(None, tmp_path / "one", 0, 3)
    first, _ = train(None, tmp_path / "many", 0, 1)
    for losses, state in pool.run(train, tmp_path / "many", 1, 3, names=("h", "w"), timeout=60):
        assert_close(torch.tensor([*first, *losses]).double(), torch.tensor(straight).double())
        for name in state:
            assert_close(state[name], expected[name])
