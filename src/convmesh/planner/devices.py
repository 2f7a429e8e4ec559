"""What a device can do: published figures of some GPUs and links, or one's own in a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .problem import PlanError

GB, TB, TFLOPS = 10**9, 10**12, 10**12


@dataclass(frozen=True)
class Link:
    """Between two devices: seconds before the first byte, and bytes a second in one direction."""

    latency: float
    bandwidth: float

    def slower(self, times: float) -> Link:
        return Link(self.latency * times, self.bandwidth / times)


@dataclass(frozen=True)
class Device:
    """The figures of a device that a plan is made for. Rates are those of the data sheet, without sparsity.

    Attributes:
        memory: In bytes.
        flops: Operations per second, by the name of the dtype.
        bandwidth: Of the memory, in bytes per second.
        node: The link between two devices of one node.
        network: The link between two devices of different nodes.
        node_ranks: The number of devices of a node.
        overhead: The least time of an operator, in seconds.
        compute_share: The fraction of `flops` that programs reach.
        memory_share: The fraction of `bandwidth` that programs reach.
        source: Where the figures come from.
        cores: For a CPU, the cores that the ranks of a node share; 0 if each rank has a device of its own.
        sums: The link for reductions and gathers, if these take another way than halos.

    Examples:
        >>> link = convmesh.planner.Link(latency=5e-6, bandwidth=50e9)
        >>> convmesh.Device("mine", 24 * 10**9, {"float32": 80e12}, 1e12, link, link).memory
        24000000000
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    node: Link
    network: Link
    node_ranks: int = 8
    overhead: float = 5e-6
    compute_share: float = 0.4
    memory_share: float = 0.8
    source: str = ""
    cores: int = 0
    sums: Link | None = None

    def sharing(self, ranks: int) -> float:
        """Return how many times as long compute takes because ranks share cores."""
        return max(1.0, min(ranks, self.node_ranks) / self.cores) if self.cores else 1.0

    @property
    def overlaps(self) -> bool:
        """Whether messages go on beside compute. On a CPU the cores that compute copy the messages."""
        return not self.cores

    def rate(self, dtype: torch.dtype) -> float:
        """Return floating point operations a second; of a type without a figure, those of float32."""
        found = self.flops.get(str(dtype).removeprefix("torch."), self.flops["float32"])
        return found * self.compute_share

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


NDR = Link(5e-6, 50 * GB)  # InfiniBand NDR, 400 Gbit/s for each GPU: NVIDIA Quantum-2 data sheet
PCIE4 = Link(10e-6, 32 * GB)  # 16 lanes of PCI Express 4.0


def _nvlink(both_ways: int) -> Link:
    return Link(5e-6, both_ways / 2)


def _nvidia(tf32: float, half: float) -> dict[str, float]:
    """Convolutions of float32 run as TF32 unless that is switched off."""
    return {"float32": tf32 * TFLOPS, "bfloat16": half * TFLOPS, "float16": half * TFLOPS}


PRESETS: dict[str, Device] = {
    "a100": Device("A100 SXM 80 GB", 80 * GB, _nvidia(156, 312), 2.039 * TB, _nvlink(600 * GB), NDR,
                   source="NVIDIA A100 Tensor Core GPU data sheet"),
    "h100": Device("H100 SXM 80 GB", 80 * GB, _nvidia(494.5, 989.5), 3.35 * TB, _nvlink(900 * GB), NDR,
                   source="NVIDIA H100 Tensor Core GPU data sheet, without sparsity"),
    "h200": Device("H200 SXM 141 GB", 141 * GB, _nvidia(494.5, 989.5), 4.8 * TB, _nvlink(900 * GB), NDR,
                   source="NVIDIA H200 Tensor Core GPU data sheet, without sparsity"),
    "b200": Device("B200 SXM 180 GB", 180 * GB, _nvidia(1100, 2250), 7.7 * TB, _nvlink(1800 * GB), NDR,
                   source="NVIDIA HGX B200 data sheet, an eighth of it, without sparsity"),
    "mi300x": Device("MI300X 192 GB", 192 * GB,
                     {"float32": 163.4 * TFLOPS, "bfloat16": 1307.4 * TFLOPS, "float16": 1307.4 * TFLOPS},
                     5.3 * TB, Link(5e-6, 64 * GB), NDR, source="AMD Instinct MI300X data sheet, one link to each GPU"),
    "l40s": Device("L40S 48 GB", 48 * GB, _nvidia(183, 362.05), 0.864 * TB, PCIE4, NDR,
                   source="NVIDIA L40S data sheet, without sparsity; PCI Express 4.0"),
}  # fmt: skip


def device(name: str | Device) -> Device:
    """Return a preset, `here` for this machine, or what a file says: the JSON of a `Device`."""
    if isinstance(name, Device):
        return _checked(name, f"the device {name.name!r}")
    if name == "here":
        from .here import this_machine

        return this_machine()
    if str(name).lower() in PRESETS:
        return PRESETS[str(name).lower()]
    if Path(str(name)).suffix == ".json":
        return _read(Path(name))
    raise PlanError(f"unknown device {name!r}: choose one of {', '.join(PRESETS)}, here, or a JSON file of your own")


def _read(path: Path) -> Device:
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        links = [name for name in ("node", "network", "sums") if told.get(name) is not None or name != "sums"]
        told |= {name: Link(**told[name]) for name in links}
        return _checked(Device(**told), f"the device file {path}")
    except OSError as error:
        raise PlanError(f"the device file {path} cannot be read ({error.strerror}): name one that exists") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        known = ", ".join(field.name for field in fields(Device))
        raise PlanError(f"the device file {path} is no device ({error!r}): it is JSON with {known}") from None


def _checked(found: Device, what: str) -> Device:
    if "float32" not in found.flops:
        raise PlanError(f"{what} has no flops of float32: say how many it does a second")
    numbers = [found.memory, found.bandwidth, found.node_ranks, found.compute_share, found.memory_share]
    numbers += [*found.flops.values(), found.node.bandwidth, found.network.bandwidth]
    if not all(isinstance(number, int | float) and number > 0 for number in numbers):
        raise PlanError(f"{what} has figures that are no positive numbers: give bytes, and bytes or flops a second")
    return found
