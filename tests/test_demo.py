"""The demo at small size: its numbers, its page, and what it does when a rank fails."""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from convmesh.cli import main
from convmesh.demo import launch, picture
from convmesh.demo.page import page
from convmesh.demo.report import Report, Runs
from convmesh.demo.settings import PICTURES, DemoError, Settings, mesh_shape
from convmesh.demo.training import Run, train
from convmesh.report.words import size
from tests.harness import Pool

SMALL = Settings(crop=66, steps=4, channels=(4, 6, 8))


def on_mesh(mesh: DeviceMesh, settings: Settings) -> Run:
    return train(settings, mesh, "cpu", lambda loss: None)


def on_one(settings: Settings) -> list[Run]:
    return [train(settings, None, "cpu", lambda loss: None)]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Runs:
    meshes = {shape: pool.run(on_mesh, SMALL, mesh=shape, names=("h", "w")) for shape in ((1, 2), (2, 2))}
    return {None: on_one(SMALL), **meshes}


@pytest.fixture(scope="module")
def report(runs: Runs) -> Report:
    return Report(SMALL, runs, "convmesh demo", 1.0)


def test_the_losses_lie_on_each_other(report: Report) -> None:
    """In float32 a loss is right to about 6e-8. Sums of 66 x 66 numbers that are added up in another order, and four
    steps of Adam from there, may be some ten times as far apart; a wrong halo is off by parts of a hundred."""
    for shape in report.meshes:
        assert len(report.runs[shape][0].losses) == SMALL.steps
        assert max(report.differences(shape)) < 5e-6


def test_float64_shows_that_the_difference_is_rounding(pool: Pool) -> None:
    exact = replace(SMALL, double=True)
    (one,), many = on_one(exact), pool.run(on_mesh, exact, mesh=(2, 2), names=("h", "w"))
    torch.testing.assert_close(torch.tensor(many[0].losses), torch.tensor(one.losses), rtol=1e-12, atol=0)
    # Adam divides a gradient by its own size, and of a small one there are fewer digits.
    torch.testing.assert_close(many[0].weights, one.weights, rtol=0, atol=1e-11)


def test_ranks_agree_and_the_network_learns(runs: Runs) -> None:
    for ranks in runs.values():
        assert all(run.losses == ranks[0].losses for run in ranks)
        assert ranks[0].losses[-1] < ranks[0].losses[0]
    one = runs[None][0]
    for shape in ((1, 2), (2, 2)):
        made, expected = runs[shape][0].output, one.output
        assert made is not None
        assert expected is not None
        assert made.shape == (66, 66, 3)
        assert (made.int() - expected.int()).abs().max() <= 1  # a byte may be rounded the other way


def test_what_is_sent_is_the_least_possible(report: Report) -> None:
    for shape in report.meshes:
        for layer, sent, least in report.traffic(shape):
            assert sent == least, f"{layer.name}: {sent} bytes, and {least} are enough"
            assert layer.other == 0, f"{layer.name} gathers"
        assert sum(bool(sent) for _, sent, _ in report.traffic(shape)) == 7  # all 3x3 convolutions


def test_the_least_of_a_layer_by_hand(report: Report) -> None:
    """The first layer, 3 channels of 66 x 66 with a 3x3 kernel: a column from each side forward. Backward wants only
    the weight's gradient, for which the smaller of the two halos goes again: the picture's, with 3 channels."""
    (sides,) = (layer.sides for layer, _, _ in report.traffic((1, 2)) if layer.name == "entry.0")
    assert sides is not None
    assert sides.least_bytes(4) == 2 * 2 * (66 * 3) * 4
    assert [len(side) for side in sides.reads((0, 0))] == [66, 34]
    assert [len(side) for side in sides.owns((0, 0))] == [66, 33]


def test_the_page_has_everything_in_it(report: Report) -> None:
    text = page(report)
    for heading in (
        "Who has what",
        "What it learned",
        "The same losses",
        "Memory and time",
        "Communication",
        "was made",
    ):
        assert re.search(f"<h2>[^<]*{heading}", text), heading
    for expected in ("one process", "1x2 ranks", "2x2 ranks", "levels.join.0", "prefers-color-scheme: dark"):
        assert expected in text
    assert "http:" not in text
    assert "https:" not in text
    assert all(address.startswith("data:image/") for address in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert "url(" not in text
    assert "<script" not in text
    assert "nan" not in re.sub(r"base64,[^\"]*", "", text)


def test_a_report_without_one_process(runs: Runs) -> None:
    alone = Report(SMALL, {(1, 2): runs[(1, 2)]}, "convmesh demo --mesh-only", 1.0)
    assert "The losses of the meshes" in page(alone)


def test_sizes_have_three_digits() -> None:
    counts = (0, 4, 999, 1000, 12_345, 963_000, 2_094_000, 1_039_000_000)
    assert [size(count) for count in counts] == [
        "0 B", "4 B", "999 B", "1.00 kB", "12.3 kB", "963 kB", "2.09 MB", "1.04 GB"
    ]  # fmt: skip


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_lie_inside_the_package(name: str) -> None:
    loaded = picture.load(Settings(picture=name))
    assert loaded.shape[:2] == (1, 3)
    assert min(loaded.shape[2:]) >= 512
    assert loaded.min() >= 0
    assert 0.9 < loaded.max() <= 1


@pytest.mark.parametrize("text", ["2", "2x", "0x2", "2x2x2", "-1x2", "axb"])
def test_a_bad_mesh_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="such as 2x2"):
        mesh_shape(text)
    with pytest.raises(SystemExit):
        main(["demo", f"--mesh={text}"])
    assert "such as 2x2" in capsys.readouterr().err


def test_the_command_starts_its_own_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "report.html"
    assert main(["demo", "--mesh", "2x1", "--crop", "64", "--steps", "2", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert str(out) in shown.replace("\n", "")
    assert "2x1 ranks" in out.read_text()


def test_a_rank_that_fails_ends_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A crop of one pixel leaves the norms nothing to average, which is an error in torch."""
    status = main(["demo", "--mesh", "1x2", "--mesh-only", "--crop", "1", "--steps", "1", "--out", str(tmp_path / "x")])
    shown = capsys.readouterr().out
    assert status == 1
    assert "The demo failed" in shown
    assert "1x2 ranks: rank" in shown
    assert not (tmp_path / "x").exists()


def test_a_rank_that_dies_ends_the_run() -> None:
    context = mp.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(target=os._exit, args=(3,))
    process.start()
    far_end.close()
    with pytest.raises(DemoError, match="1x2 ranks: rank 0 died, exit code 3"):
        launch._collect([(process, pipe)], "1x2 ranks", lambda loss: None)


def test_torchrun(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = tmp_path / "report.html"
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "convmesh"]
    options = ["demo", "--mesh", "2x1", "--crop", "64", "--steps", "2", "--out", str(out)]
    done = subprocess.run([*program, *options], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The page is" in done.stdout
    assert done.stdout.count("The page is") == 1
    text = out.read_text()
    assert "2x1 ranks" in text
    assert "torchrun --nproc-per-node 2 -m convmesh demo" in text
