"""Which operators wait for the device, or copy from the host, on sharded tensors: the table of docs/clusters.md.

What is in neither list is a layer of a network: `test_training.py` has whole steps, none of which does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.accelerator.device import take_events
from tests.accelerator.ranks import results
from tests.cases import place

# Of x [2 4 8 8], which is sharded along dimension 2, as is a mask of it, and of a few indices.
Call = Callable[[Tensor, Tensor, Tensor], Any]
WAIT: dict[str, Call] = {
    "x[mask]": lambda x, mask, i: x[mask],
    "masked_select": lambda x, mask, i: x.masked_select(mask),
    "masked_scatter": lambda x, mask, i: x.masked_scatter(mask, x),
    "nonzero": lambda x, mask, i: mask.nonzero(),
    "argwhere": lambda x, mask, i: mask.argwhere(),
    "unique": lambda x, mask, i: x.unique(),
    "scatter": lambda x, mask, i: x.scatter(2, mask.long(), x),
    "scatter_add": lambda x, mask, i: x.scatter_add(2, mask.long(), x),
    "take": lambda x, mask, i: x.take(i),
    "put_": lambda x, mask, i: x.clone().put_(i, i.double()),
    "median of all": lambda x, mask, i: x.median(),
    "histc without a range": lambda x, mask, i: x.histc(4),
    "histogram": lambda x, mask, i: x.histogram(4),
    "inv": lambda x, mask, i: torch.linalg.inv(x),
    "bincount": lambda x, mask, i: mask.long().flatten().bincount(),
    "one_hot": lambda x, mask, i: F.one_hot(mask.long(), 2),
    "repeat_interleave(tensor)": lambda x, mask, i: x.repeat_interleave(i.repeat(2)[:4], 1),
    "equal": lambda x, mask, i: torch.equal(x, x),
    "allclose": lambda x, mask, i: torch.allclose(x, x),
    "item": lambda x, mask, i: x.sum().item(),
    "x[:, [0, 2]]": lambda x, mask, i: x[:, [0, 2]],
    "shard": lambda x, mask, i: convmesh.shard(torch.ones(2, 4, 8, 8), x.device_mesh, h=2),  # type: ignore[attr-defined]
    "from_region": lambda x, mask, i: convmesh.from_region(
        torch.ones(2, 4, 4, 8),
        (2, 4, 8, 8),
        x.device_mesh,
        h=2,  # type: ignore[attr-defined]
    ),
}
DO_NOT: dict[str, Call] = {
    "masked_fill": lambda x, mask, i: x.masked_fill(mask, 0.0),
    "x[mask] = number": lambda x, mask, i: x.clone().__setitem__(mask, 0.0),
    "where": lambda x, mask, i: torch.where(mask, x, 0.0),
    "index": lambda x, mask, i: x[:, :, i],
    "index_select": lambda x, mask, i: x.index_select(2, i),
    "index_add": lambda x, mask, i: x.index_add(2, i, x[:, :, :3]),
    "index_fill": lambda x, mask, i: x.index_fill(2, i, 0.0),
    "embedding": lambda x, mask, i: F.embedding(mask.long(), x[0, 0]),
    "scatter elsewhere": lambda x, mask, i: x.scatter(1, mask.long(), x),
    "gather": lambda x, mask, i: x.gather(2, mask.long()),
    "sort": lambda x, mask, i: x.sort(2),
    "kthvalue": lambda x, mask, i: x.kthvalue(2, 2),
    "searchsorted": lambda x, mask, i: torch.searchsorted(x.sort(3)[0], x),
    "topk": lambda x, mask, i: x.topk(3, 2),
    "median": lambda x, mask, i: x.median(2),
    "quantile": lambda x, mask, i: x.quantile(0.3, 2),
    "argmax": lambda x, mask, i: (x.argmax(2), x.argmax()),
    "cumsum": lambda x, mask, i: x.cumsum(2),
    "histc": lambda x, mask, i: x.histc(4, 0, 1),
    "cross_entropy": lambda x, mask, i: F.cross_entropy(x, mask[:, 0].long()),
    "bernoulli": lambda x, mask, i: x.bernoulli(),
    "multinomial": lambda x, mask, i: x[0, 0].multinomial(2),
    "dropout": lambda x, mask, i: F.dropout(x, 0.5),
    "interpolate": lambda x, mask, i: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "max_unpool": lambda x, mask, i: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "adaptive_max_pool": lambda x, mask, i: F.adaptive_max_pool2d(x, 3),
    "attention": lambda x, mask, i: F.scaled_dot_product_attention(x, x, x),
    "fft": lambda x, mask, i: torch.fft.fft(x, dim=2),
    "var": lambda x, mask, i: x.var(2),
}


def waiting(mesh: DeviceMesh) -> dict[str, list[str]]:
    """What each call waits for or copies, once it has been made twice."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2, 4, 8, 8, dtype=torch.float64, generator=generator)
    events = {}
    with convmesh.enable():
        x, mask = (place(tensor.to("acc"), mesh, (2,)) for tensor in (values, values > 0.5))
        indices = place(torch.tensor([1, 6, 3]).to("acc"), mesh, ("R",))
        for name, call in (WAIT | DO_NOT).items():
            for _ in range(3):
                take_events()
                call(x, mask, indices)
                events[name] = take_events()
    return events


def test_what_waits_for_the_device() -> None:
    for events in results(waiting):
        assert {name for name, found in events.items() if found} == set(WAIT), events
