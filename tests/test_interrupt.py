"""A run of the tests that is interrupted or killed leaves no process behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPTED_RUN = """
from tests.harness import Pool
from tests.test_harness import assert_works, hang

if __name__ == "__main__":
    with Pool() as pool:
        assert_works(pool)
        print("all ranks are running", flush=True)
        pool.run(hang, 0, mesh=(1,))
"""


def _heed_interrupts() -> None:
    """Whoever runs the tests in the background of a shell ignores them, and so would everything that is started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_the_run_is_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    script = tmp_path / "interrupted_run.py"
    script.write_text(INTERRUPTED_RUN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=_heed_interrupts,
    ) as run:  # fmt: skip
        assert run.stdout is not None
        assert any("all ranks are running" in line for line in run.stdout)
        run.send_signal(how)
        # The ranks have inherited this output, so it ends only when the last of them has ended.
        run.communicate(timeout=30)
    assert run.returncode != 0
    if how == signal.SIGINT:
        assert not list(tmp_path.glob("convmesh-pool-*"))
