"""What a plan says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import convmesh
from convmesh import cli
from convmesh.models import UNet
from convmesh.planner.trace import Kind


class Packed(nn.Module):
    """Looks at pairs of numbers as one, which shards of an odd length have not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return y + y.detach().view(torch.float64).mean()


class Spectrum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.fftn(x).abs()


def test_says_the_essence_in_five_lines() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, {"h": 4})
    assert len(repr(plan).splitlines()) == 5
    # A rank in the middle sends a row of 8 float32 to two neighbours, forward; the input needs no gradient.
    middle = next(rank for rank in plan.ranks if rank.name.startswith("interior"))
    assert middle.layers[0].forward_bytes == 2 * 8 * 4


def test_results_of_an_operator_are_there_before_what_it_was_given_goes() -> None:
    plan = convmesh.plan(nn.Sequential(nn.ReLU(), nn.ReLU()), {"input": (1, 1, 8, 8)}, {"h": 1})
    # Input, the first ReLU's result, of which nothing is kept, and the second's, at once.
    assert plan.peak >= 3 * 8 * 8 * 4


def test_convolutions_have_workspaces_that_count() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 64, 64)}, {"h": 1})
    parts = plan.largest.memory.peak.parts
    assert parts[Kind.WORKSPACES] == 2 * 64 * 64 * 4, "the input and the gradient of the output"
    small = convmesh.Device("small", plan.peak - 1, {"float32": 1e9}, 1e9, *[convmesh.planner.Link(1e-6, 1e9)] * 2)
    rows = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 64, 64)}, {"h": 1}, device=small).scaling
    assert not rows[0].fits


def test_json_has_all_tables() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, {"h": 2})
    told = json.loads(plan.to_json())
    assert told["ranks"][0]["memory"]["peak"]["parts"]["inputs"] == 4 * 8 * 4
    assert told["fits"] is True


def test_a_mesh_that_does_not_fit_is_not_the_best() -> None:
    small = convmesh.Device("small", 2000, {"float32": 1e9}, 1e9, *[convmesh.planner.Link(1e-6, 1e9)] * 2)
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 16, 16)}, ranks=4, device=small)
    assert plan.fits
    assert not all(row.fits for row in plan.meshes)


def test_a_step_of_ones_own() -> None:
    def build(mesh: object) -> object:
        model = convmesh.distribute(nn.Conv2d(1, 2, 3, padding=1), mesh)  # type: ignore[arg-type]

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            nn.functional.cross_entropy(model(x), y).backward()

        return step

    inputs = {"x": (1, 1, 8, 8), "y": convmesh.Input((1, 8, 8), torch.int64)}
    assert convmesh.plan(build, inputs, {"h": 2}).largest.layers  # type: ignore[arg-type]


def test_ranks_with_fewer_samples_are_a_class_of_their_own() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (8, 1, 8, 8)}, {"data": 3})
    assert [rank.name for rank in plan.ranks] == ["(data 0)", "(data 2)"]  # which have 3 and 2
    assert len(convmesh.plan(nn.ReLU(), {"input": (8, 1, 8, 8)}, {"data": 4, "h": 4}).ranks) == 3


def test_what_is_sent_is_the_least_and_goes_to_neighbours() -> None:
    plan = convmesh.plan(UNet(3, 1, 2, (4, 8), (2,)), {"x": (1, 1, 16, 16, 16)}, {"d": 4, "w": 2})
    halos = {layer.layer: layer for rank in plan.ranks for layer in rank.layers if layer.halo_bytes}
    assert halos
    total = sum(layer.halo_bytes for rank in plan.ranks for layer in rank.layers)
    least = sum(layer.least or 0 for rank in plan.ranks for layer in rank.layers)
    assert total == pytest.approx(least, rel=0.02)  # corners are passed on by neighbours
    first = plan.ranks[[rank.rank for rank in plan.ranks].index(0)]
    assert {tuple(one.steps.items()) for one in first.neighbours} == {(("d", 1),), (("w", 1),)}
    assert sum(one.bytes for one in first.neighbours) == sum(layer.halo_bytes for layer in first.layers)


def test_a_refused_operator_is_named_with_its_line_and_the_plan_goes_on() -> None:
    plan = convmesh.plan(Packed(), {"x": (1, 1, 8, 6)}, {"w": 2})
    (refused,) = plan.largest.refusals
    assert "test_plan.py" in str(refused.where)
    assert "shards of the last dimension" in refused.message
    assert refused.remedy
    assert not plan.fits
    assert "IS REFUSED" in repr(plan)
    assert convmesh.plan(Packed(), {"x": (1, 1, 8, 6)}, ranks=2).fits, "another mesh does not refuse it"


def test_gathers_have_a_line_and_a_remedy() -> None:
    (gather,) = convmesh.plan(Spectrum(), {"x": (1, 1, 8, 8)}, {"h": 2}).largest.gathers
    assert "test_plan.py" in str(gather.where)
    assert "not transformed" in gather.remedy


def test_the_smallest_number_of_ranks_that_fits() -> None:
    model, inputs = UNet(2, 1, 2, (4, 8), (2,)), {"x": (1, 1, 64, 64)}
    needed = {row.ranks: row.memory for row in convmesh.plan(model, inputs, {"h": 4}).scaling}
    small = convmesh.Device("small", needed[2] * 5 // 4, {"float32": 1e9}, 1e9, *[convmesh.planner.Link(1e-6, 1e9)] * 2)
    plan = convmesh.plan(model, inputs, {"h": 4}, device=small)
    assert [row.ranks for row in plan.scaling] == [1, 2, 4]
    assert plan.smallest == 2
    assert any("2 ranks would be enough" in line for line in plan.advice)


def test_more_ranks_are_tried_where_it_does_not_fit() -> None:
    model, inputs = UNet(2, 1, 2, (4, 8), (2,)), {"x": (1, 1, 64, 64)}
    needed = convmesh.plan(model, inputs, {"h": 3, "w": 2}).peak
    small = convmesh.Device("small", needed, {"float32": 1e9}, 1e9, *[convmesh.planner.Link(1e-6, 1e9)] * 2)
    plan = convmesh.plan(model, inputs, {"h": 2}, device=small)
    assert not plan.fits
    assert plan.smallest == 6
    assert {row.ranks: row.fits for row in plan.scaling} == {1: False, 2: False, 4: False, 5: False, 6: True, 8: True}


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 16, 16), (1, 1, 16, 16, 16)], ids=str)
def test_the_page_has_everything_in_it(shape: tuple[int, ...], tmp_path: Path) -> None:
    plan = convmesh.plan(UNet(len(shape) - 2, 1, 2, (4, 8), (2,)), {"x": shape}, ranks=4)
    plan.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    for heading in (
        "What to do",
        "Who has what",
        "Memory over the step",
        "Time",
        "What is sent",
        "More or fewer",
        "device",
    ):
        assert heading in text
    assert "http:" not in text
    assert "https:" not in text
    assert "<script" not in text
    assert "url(" not in text
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["scaling"][0]["mesh"]
    with pytest.raises(convmesh.PlanError, match="ends in"):
        plan.save(tmp_path / "plan.pdf")


def test_this_machine() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 4, 3, padding=1), {"input": (1, 1, 32, 32)}, {"h": 2}, device="here")
    assert plan.seconds > 0
    assert plan.device.cores > 0
    assert not torch.distributed.is_initialized()


def test_layers_have_the_names_that_the_model_gives_them(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["convmesh.models:UNet", "--with", "spatial_dims=2", "in_channels=1", "out_channels=1", "channels=4,8"]
    assert cli.main(["plan", *arguments, "strides=2,", "--input", "1,1,16,16", "--mesh", "h=2", "--json", str(out),
                     "--html", str(tmp_path / "plan.html")]) == 0  # fmt: skip
    layers = [layer["layer"] for layer in json.loads(out.read_text())["ranks"][0]["layers"]]
    assert any(name.startswith("entry.") for name in layers)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["torch.nn:Conv2d", "--with", "in_channels=1", "out_channels=1", "kernel_size=3"]
    assert cli.main(["plan", *arguments, "--input", "1,1,16,16", "--ranks", "2", "--json", str(out),
                     "--html", str(tmp_path / "plan.html")]) == 0  # fmt: skip
    assert "<svg" in (tmp_path / "plan.html").read_text()
    assert "fits" in capsys.readouterr().out
    assert json.loads(out.read_text())["mesh"]
