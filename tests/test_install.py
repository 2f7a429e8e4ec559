"""The wheel in an environment that has torch and what torch's metadata asks for, and nothing else until pip adds it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.worker import loopback

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "convmesh"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, status: int = 0) -> str:
    """What it prints, as if nothing of this environment were there."""
    passed = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CONVMESH"))}
    environment = {**passed, "GLOO_SOCKET_IFNAME": loopback(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", made)
    run(sys.executable, "-m", "pip", "wheel", *options, ROOT, cwd=made)
    return next(made.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the wheel. Of torch it has the build that is installed here, whichever that is, by links."""
    made = tmp_path_factory.mktemp("environment")
    venv.create(made, symlinks=True)
    (packages,) = made.glob("lib/python*/site-packages")
    for name in _with_requirements("torch"):
        files = distribution(name).files
        assert files is not None
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(distribution(name).locate_file(top)))
    _install(made, str(wheel))
    return made


def _with_requirements(name: str) -> set[str]:
    found: set[str] = set()

    def visit(names: Iterable[str]) -> None:
        for each in set(names) - found:
            try:
                wanted = map(Requirement, distribution(each).requires or ())
            except PackageNotFoundError:
                continue  # of another platform, or there by another name
            found.add(each)
            visit(one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""}))

    visit([name])
    return found


def _install(environment: Path, what: str) -> None:
    run(sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "-q", what, cwd=environment)


def test_everything_is_in_the_wheel(wheel: Path) -> None:
    files = {f"convmesh/{p.relative_to(PACKAGE)}" for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    found = set(zipfile.ZipFile(wheel).namelist())
    assert files <= found
    assert {f"convmesh/{name}" for name in ("py.typed", "batching/prices.json", "kernels/norms.cpp")} <= found


SETTING = """
import torch, torch.distributed as dist, torch.nn.functional as F
from convmesh.models import UNet as Network

dist.init_process_group("gloo")
torch.manual_seed(0)
network = Network(2, 3, 2, (4, 8), (2,))
images, labels = torch.randn(2, 3, 16, 16), torch.randint(2, (2, 16, 16))
expected = F.cross_entropy(network(images), labels).item()
UNet = lambda: network
"""
CHECK = """
assert abs(loss.item() - expected) < 1e-5 * expected, (loss.item(), expected)
dist.destroy_process_group()
"""


def test_the_first_lines_of_readme(environment: Path, tmp_path: Path) -> None:
    """As they stand, but on two processes of this machine."""
    (lines,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[:1]
    lines, meshes = re.subn(r'init_device_mesh\("cuda", \([\d, ]+\)', 'init_device_mesh("cpu", (1, 2, 1)', lines)
    lines, optimizers = re.subn(
        "^loss.backward", r"optimizer = torch.optim.SGD(model.parameters(), 0.1)\n\g<0>", lines, flags=re.MULTILINE
    )
    assert (meshes, optimizers) == (1, 1)
    script = tmp_path / "train.py"
    script.write_text(SETTING + lines + CHECK)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run(environment / "bin/python", *launch, script, cwd=tmp_path)


def test_the_commands(environment: Path, tmp_path: Path) -> None:
    assert "convolution_backward" in run(environment / "bin/convmesh", "operators", cwd=tmp_path)
    shown = run(environment / "bin/python", "-m", "convmesh", "--help", cwd=tmp_path)
    assert all(name in shown for name in ("operators", "demo", "calibrate"))


def test_the_demo_says_what_it_needs_and_works_with_it(environment: Path, wheel: Path, tmp_path: Path) -> None:
    demo = (environment / "bin/convmesh", "demo", "--mesh", "1x2", "--steps", "1", "--crop", "32")
    assert "pip install 'convmesh[demo]'" in run(*demo, cwd=tmp_path, status=1)
    _install(environment, f"{wheel}[demo]")
    assert "report.html" in run(*demo, cwd=tmp_path)
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1000
