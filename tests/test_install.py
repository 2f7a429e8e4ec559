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
    """What it prints, with errors if it fails, as if nothing of this environment were there."""
    passed = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CONVMESH"))}
    environment = {**passed, "GLOO_SOCKET_IFNAME": loopback(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + (ended.stderr if status else "")


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
    assert {f"convmesh/{name}" for name in ("py.typed", "kernels/norms.cpp")} <= found


def test_the_script_of_readme(environment: Path, tmp_path: Path) -> None:
    """As it stands, on one process and on two: the losses are the same."""
    (script,) = re.findall(r"```python\n(# train\.py\n.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    launch = ("-m", "torch.distributed.run", "--standalone")
    one, two = (
        run(environment / "bin/python", *launch, f"--nproc-per-node={ranks}", "train.py", cwd=tmp_path)
        for ranks in (1, 2)
    )
    assert len(one.splitlines()) == 5
    assert two == one


def test_the_commands(environment: Path, tmp_path: Path) -> None:
    """What prints tables needs rich and says so; nothing else does."""
    command = environment / "bin/convmesh"
    assert "`convolution_backward`" in run(command, "operators", "--markdown", cwd=tmp_path)
    shown = run(environment / "bin/python", "-m", "convmesh", "--help", cwd=tmp_path)
    assert all(name in shown for name in ("operators", "demo", "selftest"))
    assert "pip install 'convmesh[cli]'" in run(command, "operators", cwd=tmp_path, status=1)


def test_the_demo_says_what_it_needs_and_works_with_it(environment: Path, wheel: Path, tmp_path: Path) -> None:
    command = environment / "bin/convmesh"
    demo = (command, "demo", "--mesh", "1x2", "--steps", "1", "--crop", "32")
    assert "pip install 'convmesh[demo]'" in run(*demo, cwd=tmp_path, status=1)
    _install(environment, f"{wheel}[cli]")
    assert "convolution_backward" in run(command, "operators", cwd=tmp_path)
    assert "pip install 'convmesh[demo]'" in run(*demo, cwd=tmp_path, status=1)
    _install(environment, f"{wheel}[demo]")
    assert "report.html" in run(*demo, cwd=tmp_path)
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1000
