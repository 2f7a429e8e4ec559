"""Some networks of the zoo, in `make test`: equal to one process, and nothing is gathered."""

from __future__ import annotations

import os
import time

import pytest

from convmesh.ops.linalg import attention
from convmesh.ops.random import bernoulli
from tests.zoo.page import page, read
from tests.zoo.registry import networks
from tests.zoo.run import Found, compare, on_one
from tests.zoo.workers import call_all

pytestmark = pytest.mark.slow  # and `make compat` has no other people's packages

# By name, the layout.
CHOSEN = {
    "AutoencoderKL: encode": 1,
    "AutoencoderKL: decode": 0,
    "AsymmetricAutoencoderKL: encode": 1,
    "ConvNextV2ForImageClassification": 0,
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GATHERED_BYTES", 0)
    monkeypatch.setattr(bernoulli, "BLOCK", 1 << 9)


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("name", CHOSEN)
def test_a_network(name: str) -> None:
    (network,) = [one for one in networks([]) if one.name == name]
    layout = network.layouts[CHOSEN[name]]
    found = compare(network, layout, on_one(network))
    assert found.sharded, found
    if "Autoencoder" in name:  # whose results are maps: sharded as the input is
        wanted = ", ".join(f"Shard(dim={dim})" for dim in layout[1])
        assert found.placed.startswith(f"({wanted}"), found.placed


def test_the_page_is_the_record() -> None:
    found = [
        Found("MONAI", "A", (2, 2), (2, 3), error=2e-13, largest=0.25, received=0.12, tolerance=1e-7),
        Found("MONAI", "B", (3,), (3,), error=3e-6, largest=1.5, received=0.5, tolerance=1e-4),
        Found("timm", "C", (), (), refused="one process: ValueError: no"),
        Found("timm", "D: decode", (4,), (2,), refused="ShardingError: why"),
    ]
    assert read(page(found)) == found


def work(kind: str) -> str:
    if kind == "hangs":
        time.sleep(3600)
    if kind == "dies":
        os._exit(1)
    return kind.upper()


def test_a_network_that_hangs_is_given_up() -> None:
    calls = [("a",), ("dies",), ("hangs",), ("b",)]
    found = {name: returned for (name,), returned in call_all(work, calls, 2, limit=20)}
    assert (found["a"], found["b"]) == ("A", "B")
    assert isinstance(found["dies"], RuntimeError)
    assert isinstance(found["hangs"], TimeoutError)
