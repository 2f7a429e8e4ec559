"""Some networks of the zoo, in `make test`: equal to one process, and nothing is gathered."""

from __future__ import annotations

import pytest

from convmesh.ops.linalg import attention
from convmesh.ops.random import bernoulli
from tests.zoo.registry import networks
from tests.zoo.run import compare, on_one

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
    monkeypatch.setattr(bernoulli, "BLOCK", 1 << 12)


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
