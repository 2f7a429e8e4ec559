"""Hosts as Linux namespaces: each has its own network, processes, shared memory, mounts and name.

They are joined by a switch, which is a namespace as well. So nothing of the machine's own network is touched, and all
is gone when the processes that hold the namespaces have ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ADDRESS = "10.203.17.{}"  # nobody outside of these namespaces sees it
NETWORK = ("--net",)
EVERYTHING = ("--net", "--pid", "--ipc", "--mount", "--uts")
TOOLS = ("ip", "unshare", "nsenter")


def obstacle() -> str | None:
    """Why there can be no such hosts here."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts are made of Linux namespaces, which takes root on Linux"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"needs {', '.join(missing)}: install iproute2 and util-linux" if missing else None


class Namespaces:
    """A process that holds namespaces of its own, and a way to run commands in them."""

    def __init__(self, kinds: Sequence[str], setup: str = "true") -> None:
        forks = ("--fork", "--kill-child", "--mount-proc") if "--pid" in kinds else ()
        command = ["unshare", *kinds, *forks, "sh", "-c", f"{setup} && echo ready && exec sleep infinity"]
        self._kinds = kinds
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{' '.join(command)} has failed")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0]) if children else self._holder.pid

    def command(self, *words: str) -> list[str]:
        return ["nsenter", f"--target={self.pid}", *self._kinds, "--", *words]

    def run(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True)

    def end(self) -> None:
        """All processes in it, where it has processes of its own, end at once."""
        self._holder.kill()
        self._holder.wait()


class Network:
    """So many hosts, named host0, host1, ..., each with an interface eth0 to the switch."""

    def __init__(self, count: int, folder: Path) -> None:
        names = folder / "hosts"
        addresses = [f"{ADDRESS.format(number + 1)} host{number}" for number in range(count)]
        names.write_text("\n".join(["127.0.0.1 localhost", *addresses, ""]))
        self.switch = Namespaces(NETWORK, "ip link add switch type bridge && ip link set switch up")
        self.hosts: list[Namespaces] = []
        for number in range(count):
            setup = (
                f"mount -t tmpfs tmpfs /dev/shm && mount --bind {names} /etc/hosts && hostname host{number} "
                f"&& ip link set lo up"
            )
            host = Namespaces(EVERYTHING, setup)
            self.hosts.append(host)
            self.switch.run(
                *("ip", "link", "add", f"port{number}", "type", "veth"),
                *("peer", "name", "eth0", "netns", str(host.pid)),
            )
            self.switch.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
            host.run("ip", "address", "add", f"{ADDRESS.format(number + 1)}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")

    def link(self, number: int, state: str) -> None:
        """Plug a host's cable in (`up`) or out (`down`): neither side is told."""
        self.switch.run("ip", "link", "set", f"port{number}", state)

    def runs(self, number: int, process: Path) -> bool:
        """Whether a process, a folder of /proc, is on this host."""
        return os.readlink(process / "ns/pid") == os.readlink(f"/proc/{self.hosts[number].pid}/ns/pid")

    def vanish(self, number: int) -> None:
        """As by a power cut: nobody gets as much as the end of a connection."""
        self.link(number, "down")
        self.hosts[number].end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for namespaces in (*self.hosts, self.switch):
            namespaces.end()


class Job:
    """torchrun on hosts, as a user starts it: the same line on each."""

    def __init__(self, network: Network, nodes: str, processes: int, script: Sequence[str], folder: Path) -> None:
        self._logs = [folder / f"host{number}.log" for number in range(len(network.hosts))]
        self._runs = []
        for host, log in zip(network.hosts, self._logs, strict=True):
            words = [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes),
                *("--nproc-per-node", str(processes), "--max-restarts", "3", "--monitor-interval", "0.5"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400", "--rdzv-id", "job"),
                *("--rdzv-conf", "last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=3"),
                *("--shutdown-timeout", "3", *script),
            ]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
            with log.open("w") as output:
                self._runs.append(
                    subprocess.Popen(host.command(*words), stdout=output, stderr=subprocess.STDOUT, env=environment)
                )

    def wait(self, seconds: float, but: int | None = None) -> None:
        """Until torchrun has ended well on all hosts, `but` on one that is no more."""
        deadline = time.monotonic() + seconds
        for number, run in enumerate(self._runs):
            if number != but:
                code = run.wait(max(1.0, deadline - time.monotonic()))
                assert code == 0, f"torchrun on host{number} has ended with {code}:\n{self.said(number)[-4000:]}"

    def said(self, number: int) -> str:
        return self._logs[number].read_text()

    def end(self) -> None:
        for run in self._runs:
            run.kill()
            run.wait()
