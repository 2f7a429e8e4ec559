"""What a plan says of bad input: one line, with what would help."""

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


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]


class Silent(nn.Module):
    def forward(self, x: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize(
    ("figures", "says"),
    [({"flops": {"bfloat16": 1e12}}, "no flops of float32"), ({"memory": "much"}, "no positive numbers"),
     ({"bandwidth": 0}, "no positive numbers"), ({"node": 1}, "is no device")],
)  # fmt: skip
def test_a_device_file_that_is_none(figures: dict[str, object], says: str, tmp_path: Path) -> None:
    link = {"latency": 1e-6, "bandwidth": 1e9}
    told = {"name": "mine", "memory": 10**9, "flops": {"float32": 1e12}, "bandwidth": 1e9}
    told |= {"node": link, "network": link}
    (tmp_path / "device.json").write_text(json.dumps(told | figures))
    with pytest.raises(convmesh.PlanError, match=says):
        convmesh.plan(nn.ReLU(), {"input": (1, 1, 8, 8)}, {"h": 2}, device=str(tmp_path / "device.json"))


@pytest.mark.parametrize("model", [Picky(), Positive()])
def test_values_are_not_asked_for(model: nn.Module) -> None:
    with pytest.raises(convmesh.PlanError, match=r"depends on values.*test_bad_input.py:\d+"):
        convmesh.plan(model, {"x": (1, 1, 8, 8)}, {"h": 2})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere:Net", "--input", "1,1,8,8", "--ranks", "2"], "cannot be imported"),
        (["convmesh.models:UNet", "--input", "1,1,8,8", "--ranks", "2"], "cannot be built"),
        ([":UNet", "--input", "1,1,8,8", "--ranks", "2"], "names no model"),
        (["tests.planner.test_bad_input:Silent", "--input", "1,1,8,8", "--mesh", "h=2"], "no floating point tensor"),
        (["torch.nn:Bilinear", "--with", "in1_features=8", "in2_features=8", "out_features=1",
          "--input", "1,1,8,8", "--mesh", "h=2"], "missing 1 required positional argument"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h=2,h=2"], "twice"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--ranks", "two"], "is no number of ranks"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--ranks", "3000"], "take 16"),
        (["convmesh.models", "--input", "1,1,8,8", "--ranks", "2"], "names no model"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h=9"], "more ranks than the 8 indices"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "z=2"], "shards nothing"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h"], "is no mesh"),
        (["torch.nn:ReLU", "--input", "1,x", "--ranks", "2"], "is no shape"),
        (["torch.nn:ReLU", "--input", "1,1,8,8"], "give a mesh"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h=2,w=2", "--ranks", "6"], "whose product is 6"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--ranks", "0"], "take 1 or more"),
        (["torch.nn:Linear", "--with", "in_features=5", "out_features=1", "--input", "1,1,8,8", "--mesh", "h=2"], "5"),
        (["math:sqrt", "--with", "x=4", "--input", "1,1,8,8", "--mesh", "h=2"], "cannot be built"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--mesh", "h=2", "--html", "/nowhere/plan.html"], "cannot be written"),
        (["torch.nn:ReLU", "--input", "1,1,8,8", "--ranks", "2", "--device", "abacus"], "unknown device"),
        (["tests.planner.exits:Net", "--input", "1,1,8,8", "--ranks", "2"], "cannot be imported"),
        (["torch.nn:Conv2d", "--with", "in_channels=3", "out_channels=1", "kernel_size=3",
          "--input", "1,1,8,8", "--mesh", "h=2"], "channels"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.strip().splitlines()) == 1


def test_bad_arguments_say_what_would_help() -> None:
    model, inputs, mesh = nn.ReLU(), {"input": (1, 1, 8, 8)}, {"h": 2}
    calls: list[tuple[tuple[object, ...], dict[str, object], str]] = [
        ((model, (1, 1, 8, 8), mesh), {}, "by name"),
        (("relu", inputs, mesh), {}, "is no step"),
        ((nn.ReLU, inputs, mesh), {}, "is no step"),
        ((nn.LazyConv2d(1, 3), inputs, mesh), {}, "run it once"),
        ((lambda mesh: None, inputs, mesh), {}, "return the step"),
        ((lambda mesh: nn.Conv2d(1, 1, 3), inputs, mesh), {}, "convmesh.distribute"),
        ((model, inputs, (2, 2)), {}, "give sizes by name"),
        ((model, inputs, {}), {}, "give sizes by name"),
        ((model, inputs, {"h": "2"}), {}, "no number of ranks"),
        ((model, inputs), {"ranks": "4"}, "take 1 or more"),
        ((model, inputs, mesh), {"device": None}, "unknown device"),
        ((model, inputs, mesh), {"dims": {"h": -2}}, "no such dimension"),
    ]
    for given, options, says in calls:
        with pytest.raises(convmesh.PlanError, match=says):
            convmesh.plan(*given, **options)  # type: ignore[arg-type]
