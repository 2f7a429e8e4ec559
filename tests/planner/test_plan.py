"""What a plan says, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import convmesh
from convmesh import cli


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.max() > 0 else -x


def test_says_the_essence_in_five_lines() -> None:
    plan = convmesh.plan(nn.Conv2d(1, 1, 3, padding=1), {"input": (1, 1, 8, 8)}, {"h": 4})
    assert len(repr(plan).splitlines()) == 5
    # A rank in the middle sends a row of 8 float32 to two neighbours, forward; the input needs no gradient.
    middle = next(rank for rank in plan.ranks if rank.name.startswith("interior"))
    assert middle.layers[0].forward_bytes == 2 * 8 * 4


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


def test_values_are_not_asked_for() -> None:
    with pytest.raises(convmesh.PlanError, match=r"depends on values.*test_plan.py:\d+"):
        convmesh.plan(Picky(), {"x": (1, 1, 8, 8)}, {"h": 2})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere:Net", "--input", "1,1,8,8", "--ranks", "2"], "cannot be imported"),
        (["convmesh.models:UNet", "--input", "1,1,8,8", "--ranks", "2"], "cannot be built"),
        (["convmesh.models", "--input", "1,1,8,8", "--ranks", "2"], "names no model"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h=9"], "more ranks than the 8 indices"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "z=2"], "shards nothing"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h"], "is no mesh"),
        (["torch.nn:ReLU", "--input", "1,x", "--ranks", "2"], "is no shape"),
        (["torch.nn:ReLU", "--input", "1,1,8,8"], "either a mesh"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--ranks", "2", "--device", "abacus"], "unknown device"),
        (["torch.nn:Conv2d", "--with", "in_channels=3", "out_channels=1", "kernel_size=3",
          "--input", "1,1,8,8", "--mesh", "h=2"], "channels"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    arguments = ["torch.nn:Conv2d", "--with", "in_channels=1", "out_channels=1", "kernel_size=3"]
    assert cli.main(["plan", *arguments, "--input", "1,1,16,16", "--ranks", "2", "--json", str(out)]) == 0
    assert "fits" in capsys.readouterr().out
    assert json.loads(out.read_text())["mesh"]
