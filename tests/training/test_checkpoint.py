"""A training that is saved on one mesh and goes on on another is the training that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
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


def numbers(losses: list[float]) -> torch.Tensor:
    return torch.tensor(losses, dtype=torch.float64)


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
    assert_close(numbers([*losses, *after]), numbers(straight))
    assert state.keys() == expected.keys()
    for name in state:
        assert_close(state[name], expected[name])


def test_and_from_one_process_to_many(pool: Pool, tmp_path: Path) -> None:
    straight, expected = train(None, tmp_path / "one", 0, 3)
    first, _ = train(None, tmp_path / "many", 0, 1)
    for losses, state in pool.run(train, tmp_path / "many", 1, 3, names=("h", "w"), timeout=60):
        assert_close(numbers([*first, *losses]), numbers(straight))
        for name in state:
            assert_close(state[name], expected[name])


def test_nothing_is_removed_unless_asked(tmp_path: Path) -> None:
    training = Training(None)
    for step in (1, 2, 10):
        assert training.save(tmp_path, step).name == f"step-{step:09d}"
    again = training.save(tmp_path, 10)
    assert len(list(tmp_path.iterdir())) == 4
    assert convmesh.latest_checkpoint(tmp_path) == again
    assert training.load(tmp_path, step=10).path == again
    training.save(tmp_path, 11, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000010-1", "step-000000011"]
    with pytest.raises(convmesh.CheckpointError, match="1 or more, or None"):
        training.save(tmp_path, 11, keep=0)
    with pytest.raises(convmesh.CheckpointError, match="step=-1 is negative"):
        training.save(tmp_path, -1)
    # After going back to an earlier step, the new checkpoint is not the one that is too many.
    assert training.save(tmp_path, 3, keep=1).exists()


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    training = Training(None)
    assert convmesh.latest_checkpoint(tmp_path) is None
    with pytest.raises(convmesh.CheckpointError, match="has no checkpoint; there is: none"):
        training.load(tmp_path)
    convmesh.save_checkpoint(tmp_path, training.model, step=3)
    with pytest.raises(convmesh.CheckpointError, match="no checkpoint of step 4; there is: step-000000003"):
        convmesh.load_checkpoint(tmp_path, training.model, step=4)
    with pytest.raises(convmesh.CheckpointError, match="saved without an optimizer 'optimizer'"):
        convmesh.load_checkpoint(tmp_path, training.model, training.optimizer)
    with pytest.raises(convmesh.CheckpointError, match="no state of 'scheduler' to load into a CosineAnnealingLR"):
        convmesh.load_checkpoint(tmp_path, training.model, scheduler=training.scheduler)
    with pytest.raises(convmesh.CheckpointError, match="missing: critic/weight, critic/bias"):
        convmesh.load_checkpoint(tmp_path, training.model, critic=nn.Linear(2, 2))


def test_another_model_or_optimizer_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3))
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
    convmesh.save_checkpoint(tmp_path, model, optimizer, step=0, scheduler=scheduler)
    other = nn.Sequential(nn.Conv2d(1, 2, 5), nn.Conv2d(2, 1, 3, bias=False), nn.Conv2d(1, 1, 1))
    with pytest.raises(convmesh.CheckpointError) as caught:
        convmesh.load_checkpoint(tmp_path, other)
    assert "missing: model/2.weight, model/2.bias" in str(caught.value)
    assert "unexpected: model/1.bias" in str(caught.value)
    assert "of another shape: model/0.weight (2, 1, 3, 3) for (2, 1, 5, 5)" in str(caught.value)
    fresh = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3))
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    for made, problem in (
        (torch.optim.Adam([*fresh[1].parameters(), *fresh[0].parameters()]), "in other groups or in another order"),
        (torch.optim.Adam([{"params": layer.parameters()} for layer in fresh]), "in other groups or in another order"),
        (torch.optim.SGD(fresh.parameters()), "is the state of a Adam, not of a SGD"),
    ):
        with pytest.raises(convmesh.CheckpointError, match=problem):
            convmesh.load_checkpoint(tmp_path, fresh, made)
        assert not made.state
    with pytest.raises(convmesh.CheckpointError, match="is the state of a MultiStepLR, not of a StepLR"):
        convmesh.load_checkpoint(tmp_path, fresh, scheduler=torch.optim.lr_scheduler.StepLR(made, 2))
    with pytest.raises(convmesh.CheckpointError, match=r"another dtype: model/0.weight torch.float32 for"):
        convmesh.load_checkpoint(tmp_path, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3)).double())
    with torch.device("meta"), pytest.raises(convmesh.CheckpointError, match=r"model.to_empty\(device=...\) first"):
        convmesh.load_checkpoint(tmp_path, nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 1, 3)))
    assert all(torch.equal(before[name], tensor) for name, tensor in fresh.state_dict().items())
    with pytest.raises(convmesh.CheckpointError, match=r"a parameter of shape .* that no module has"):
        convmesh.save_checkpoint(tmp_path, nn.Linear(1, 1), optimizer, step=1)


def test_a_compiled_model_has_the_names_of_its_own(tmp_path: Path) -> None:
    model, again = nn.Conv2d(1, 1, 3), nn.Conv2d(1, 1, 3)
    compiled = torch.compile(model, backend="eager")
    optimizer, fresh = (torch.optim.SGD(m.parameters(), 0.5, momentum=0.9) for m in (compiled, again))
    compiled(torch.ones(1, 1, 4, 4)).sum().backward()
    optimizer.step()
    convmesh.save_checkpoint(tmp_path, compiled, optimizer, step=1)
    convmesh.load_checkpoint(tmp_path, again, fresh)
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(fresh.state[again.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


def small(mesh: DeviceMesh | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On a mesh, parameters are sharded over "data" by FSDP2, and buffers are on meshes of "w" alone."""
    torch.manual_seed(0 if mesh is None else 1)
    model: nn.Module = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)).double()
    if mesh is not None:
        model = fully_shard(convmesh.distribute(model, mesh["w"]), mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def through_fsdp(mesh: DeviceMesh, folder: Path) -> None:
    model, optimizer = small(mesh)
    convmesh.load_checkpoint(folder, model, optimizer)
    assert model[0].weight.to_local().numel() == model[0].weight.numel() // 2
    convmesh.save_checkpoint(folder, model, optimizer, step=2)


def test_fsdp_over_data(pool: Pool, tmp_path: Path) -> None:
    model, optimizer = small(None)
    model[1].running_mean += 3
    convmesh.save_checkpoint(tmp_path, model, optimizer, step=1)
    pool.run(through_fsdp, tmp_path, names=("data", "w"))
    again, its_optimizer = small(None)
    nn.init.zeros_(again[0].weight)
    assert convmesh.load_checkpoint(tmp_path, again, its_optimizer).step == 2
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    for number, state in its_optimizer.state_dict()["state"].items():
        for what, value in state.items():
            assert torch.equal(value, optimizer.state_dict()["state"][number][what])


class Counting(nn.Linear):
    """With a state of its own, which can be refused, and its weight under two names."""

    def __init__(self, count: int):
        super().__init__(2, 2)
        self.count, self.refuse = torch.tensor(count), False
        self.also = nn.Linear(2, 2, bias=False)
        self.also.weight = self.weight

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count, "words": ("a", None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        if self.refuse:
            raise KeyError("refused")
        self.count = state["count"]


def test_a_module_that_refuses_is_left_as_it_was(tmp_path: Path) -> None:
    model, fresh, other = Counting(3), Counting(0), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(fresh.parameters(), momentum=0.5)
    convmesh.save_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), 7.0), step=1, other=nn.Linear(1, 1))
    before = [parameter.clone() for parameter in (*fresh.parameters(), *other.parameters())]
    fresh.refuse = True
    with pytest.raises(convmesh.CheckpointError, match="refused"):
        convmesh.load_checkpoint(tmp_path, other=other, model=fresh, optimizer=optimizer)
    after = [*fresh.parameters(), *other.parameters()]
    assert all(map(torch.equal, before, after))
    assert (fresh.count, optimizer.param_groups[0]["lr"]) == (0, 1e-3)
    fresh.refuse = False
    convmesh.load_checkpoint(tmp_path, fresh, optimizer, other=other)
    assert torch.equal(fresh.weight, model.weight)
    assert fresh.also.weight is fresh.weight
    assert (fresh.count, optimizer.param_groups[0]["lr"]) == (3, 7.0)
