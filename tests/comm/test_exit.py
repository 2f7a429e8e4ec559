"""The end of a process right after a collective."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Only gloo's worker holds the tensor when the other rank comes, and it needs the interpreter to let go of it, which the
# program does not give away until it ends.
SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, convmesh
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
late = os.fork() == 0
dist.init_process_group("gloo", "file://" + sys.argv[1], world_size=2, rank=int(late))
convmesh.enable()
dist.barrier()
sys.setswitchinterval(1000)
if late:
    time.sleep(0.3)
work = dist.all_reduce(torch.ones(1000), async_op=True)
if late:
    work.wait()
del work
end = time.monotonic() + 1
while not late and time.monotonic() < end:
    pass
"""


def test_a_process_ends_in_peace_after_a_collective(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "store")], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
