"""Whole trainings on the stand-in accelerator: those of one process, without a word between device and host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.accelerator.device import take_events
from tests.accelerator.ranks import results
from tests.accelerator.training import NETWORKS, Training
from tests.cases import place
from tests.compare import assert_close
from tests.per_sample.test_sharded import network as samples_network

WARM_UP = 2
MESHES = [(2,), (2, 2)]


def losses_and_events(mesh: DeviceMesh) -> dict[str, tuple[list[float], list[float], list[str]]]:
    """By network: losses of one process and of the mesh, and what steps after warm-up wait for or copy."""
    found = {}
    for name, network in NETWORKS.items():
        alone, sharded = Training(network, None, "cpu", fused=True), Training(network, mesh, "acc", fused=True)
        expected = [alone().item() for _ in range(WARM_UP + 2)]
        losses: list[Any] = [sharded() for _ in range(WARM_UP)]
        take_events()
        losses += [sharded() for _ in range(2)]
        events = take_events()
        found[name] = expected, [loss.full_tensor().item() for loss in losses], events
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_steps_are_those_of_one_process_and_never_wait_for_the_device(mesh: tuple[int, ...]) -> None:
    for found in results(losses_and_events, mesh=mesh):
        for name, (expected, actual, events) in found.items():
            # After the layers of a deep network with norms of few values, and some steps of it, rounding has grown.
            assert actual == pytest.approx(expected, rel=1e-6 if name == "ResNet-50" else 1e-9), name
            assert actual[0] == pytest.approx(expected[0], rel=1e-11), name
            assert not events, name


OPTIMIZERS: dict[str, Any] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW, one by one": (torch.optim.AdamW, {"foreach": False}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    "Adam, capturable": (torch.optim.Adam, {"capturable": True}),
    "RMSprop": (torch.optim.RMSprop, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "RAdam": (torch.optim.RAdam, {}),
}


def steps_of_optimizers(mesh: DeviceMesh) -> dict[str, list[str]]:
    """All parameters are those of one process; returns what the last steps wait for or copy."""
    events = {}
    for name, (kind, options) in OPTIMIZERS.items():
        runs = [Training(NETWORKS["U-Net 3-d"], *where) for where in ((None, "cpu"), (mesh, "acc"))]
        for run in runs:
            # One process on a CPU has no capturable steps.
            on_cpu = {key: value for key, value in options.items() if run is runs[1] or key != "capturable"}
            run.optimizer = kind(run.model.parameters(), **on_cpu)
            for _ in range(2):
                run()
            take_events()
            torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
            run.optimizer.step()
        events[name] = take_events()
        for one, other in zip(runs[1].model.parameters(), runs[0].model.parameters(), strict=True):
            assert isinstance(one, DTensor)
            # A bias before a norm has a gradient that is nothing but rounding, and some optimizers divide by its size.
            assert_close(one.detach().to_local().cpu(), other, scale=1e6)
    return events


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_optimizers(mesh: tuple[int, ...]) -> None:
    for events in results(steps_of_optimizers, mesh=mesh):
        assert not any(events.values()), events


def goes_on(mesh: DeviceMesh, folder: Path) -> list[float]:
    """Losses of a training that is saved after a step, by other means than those that it was begun with."""
    losses = []
    run = Training(NETWORKS["U-Net 2-d"], mesh, "acc")
    losses.append(run().full_tensor().item())  # type: ignore[attr-defined]
    convmesh.save_checkpoint(folder, run.model, run.optimizer, step=1, wait=False).wait()
    drawn = torch.rand(3, device="acc").cpu()
    again = Training(NETWORKS["U-Net 2-d"], mesh, "acc")
    again()
    convmesh.load_checkpoint(folder, again.model, again.optimizer)
    assert torch.equal(torch.rand(3, device="acc").cpu(), drawn), "random numbers go on, too"
    losses += [again().full_tensor().item() for _ in range(2)]  # type: ignore[attr-defined]
    return losses


def test_checkpoints(tmp_path: Path) -> None:
    alone = Training(NETWORKS["U-Net 2-d"], None, "cpu")
    expected = [alone().item() for _ in range(3)]
    for mesh in MESHES:
        for losses in results(goes_on, tmp_path / str(len(mesh)), mesh=mesh):
            assert losses == pytest.approx(expected, rel=1e-10)  # the rounding of three steps through norms


def gradients_of_samples(mesh: DeviceMesh, layouts: list[tuple[Any, ...]]) -> None:
    """Each sample's own gradients, their norms, and the sum of the clipped ones."""
    x = torch.randn(5, 2, 8, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.arange(5)
    functions = {"per_sample_gradients": {}, "per_sample_norms": {}, "clipped_gradient": {"max_norm": 1.5}}
    for name, options in functions.items():
        function: Callable[..., Any] = getattr(convmesh, name)
        expected = function(samples_network(), F.cross_entropy, x, y, **options)
        for at in layouts:
            with convmesh.enable():
                model = convmesh.distribute(samples_network().to("acc"), mesh)
                labels = place(y.to("acc"), mesh, tuple(0 if one == 0 else "R" for one in at))
                actual = function(model, F.cross_entropy, place(x.to("acc"), mesh, at), labels, **options)
            wanted = {"": expected} if isinstance(expected, torch.Tensor) else expected
            for key, value in ({"": actual} if isinstance(actual, torch.Tensor) else actual).items():
                assert_close(value.full_tensor().cpu(), wanted[key])


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_gradients_of_samples(mesh: tuple[int, ...]) -> None:
    results(gradients_of_samples, [(0,), (3,)] if len(mesh) == 1 else [(0, 2), (2, 3)], mesh=mesh)


HALOS = (
    torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint16, torch.complex64,
)  # fmt: skip


def travels(mesh: DeviceMesh) -> None:
    """Rows of the neighbour's, in all dtypes; rolled and cut, as that computes nothing."""
    for dtype in HALOS:
        rows = torch.arange(7 * 3).view(7, 3)
        x = (rows % 2 == 0) if dtype == torch.bool else rows.to(dtype)
        with convmesh.enable():
            placed = place(x.to("acc"), mesh, (0,) * mesh.ndim)
            for made, one in ((placed.roll(3, 0), x.roll(3, 0)), (placed[2:], x[2:])):
                assert torch.equal(as_bytes(made.full_tensor().cpu()), as_bytes(one)), dtype  # type: ignore[attr-defined]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_halos_of_all_dtypes_travel(mesh: tuple[int, ...]) -> None:
    results(travels, mesh=mesh)
