"""The scripts in `examples/`, started as a user starts them, at a small size."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import Pool
from tests.worker import loopback

ROOT = Path(__file__).parent.parent


def run(script: str, mesh: str, *options: str) -> str:
    """What the first rank prints."""
    ranks = 1
    for size in mesh.split("x"):
        ranks *= int(size)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"GLOO_SOCKET_IFNAME": loopback(), "OMP_NUM_THREADS": "1", **os.environ}
    ended = subprocess.run(
        [*launch, f"examples/{script}.py", "--mesh", mesh, *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", printed)}


def test_imagenet_convnext() -> None:
    found = losses(run("imagenet_convnext", "1x2", "--steps", "31"))
    assert found[30] < 0.8 * found[0], found


def test_unet3d_volume_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = ("--steps", "6", "--every", "4", "--checkpoints", str(tmp_path))
    found = losses(run("unet3d_volume", "1x2", *options))
    assert found[6] < 0.9 * found[1], found
    (last,) = tmp_path.glob("step-*6")
    shutil.rmtree(last)
    again = losses(run("unet3d_volume", "1x1", *options))
    assert list(again) == [5, 6]
    assert [again[step] for step in again] == pytest.approx([found[step] for step in again], abs=2e-3)


@pytest.mark.slow  # `make compat` has no other people's packages
def test_augmentation_gives_the_pictures_of_one_process() -> None:
    many, one = (losses(run("augmented_volumes", mesh)) for mesh in ("1x2", "1x1"))
    assert len(many) == 6
    assert [many[step] for step in many] == pytest.approx([one[step] for step in one], abs=2e-3)


def test_huge_image_inference(tmp_path: Path) -> None:
    output = tmp_path / "output.npy"
    printed = run("huge_image_inference", "2x2", "--size", "250,333", "--output", str(output), "--check")
    assert output.stat().st_size > 2 * 250 * 333 * 4
    (difference,) = re.findall(r"greatest difference: (\S+)", printed)
    assert float(difference) < 1e-5


@pytest.mark.slow  # which needs other people's packages
@pytest.mark.parametrize(
    ("kind", "size", "pixels"), [("image", "1,4,21,30", 42 * 60), ("video", "1,4,2,8,10", 5 * 32 * 40)]
)
def test_vae_decode(tmp_path: Path, kind: str, size: str, pixels: int) -> None:
    output = tmp_path / "output.npy"
    printed = run("vae_decode", "2x1", "--kind", kind, "--size", size, "--output", str(output), "--check")
    assert output.stat().st_size > 3 * pixels * 4
    (difference,) = re.findall(r"greatest difference: (\S+)", printed)
    assert float(difference) < 1e-4


def test_dp_sgd_on_ranks_is_that_of_one_process() -> None:
    many, one = (losses(run("dp_sgd", mesh, "--steps", "11", "--seed", "0")) for mesh in ("2", "1"))
    assert many[10] < 0.8 * many[0], many
    assert [many[step] for step in many] == pytest.approx([one[step] for step in one], abs=2e-3)


def draw_seeds(_: DeviceMesh) -> list[int]:
    sys.path.insert(0, str(ROOT / "examples"))
    from dp_sgd import secret_seed

    return [secret_seed(), secret_seed()]


def test_the_seed_of_dp_sgd_is_drawn_and_the_same_on_all_ranks(pool: Pool) -> None:
    first, *others = pool.run(draw_seeds)
    assert others == [first] * 3
    assert first[0] != first[1]
