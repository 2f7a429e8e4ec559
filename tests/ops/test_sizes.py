"""No rank makes a tensor as large as one process does, nor is sent one: seen by size, on tensors large enough to tell.

What is gathered by decision is in the operators' table, and only that is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

import convmesh
from convmesh import _torch
from convmesh.comm.failures.interception import observe
from convmesh.sharding.implicit_replication import constants_allowed
from convmesh.sharding.registry import declared
from tests.cases import place
from tests.gathers import Sizes
from tests.harness import Pool
from tests.ops.families import FUNCTIONS

Function = Callable[..., Any]
# A rank's largest tensor, as a part of the largest of one process: half with two ranks, and halos. Less is a gather.
LARGEST = {2: 0.75, 4: 0.5}
# How the table says it.
GATHERS = re.compile(r"\bgather(s|ed)\b")


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dilated(dilation: int, groups: int = 1) -> Function:
    return lambda x, w: F.conv2d(x, w, padding=dilation, dilation=dilation, groups=groups)


def one_hot(x: torch.Tensor) -> torch.Tensor:
    return F.one_hot(x.detach().argmax(1), x.shape[1]).permute(0, 3, 1, 2) * x


def scattered(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x).scatter_(1, x.detach().argmax(1, keepdim=True), 1.0) * x


# Functions whose gradient, on one device, is made of a few numbers, or of zeros with a few numbers in them.
FEW_NUMBERS: dict[str, Function] = {
    "mean": lambda x: x.mean(),
    "sum": lambda x: x.sum(),
    "mean of space": lambda x: x.mean((2, 3)),
    "sum of rows": lambda x: x.sum(2),
    "kept mean": lambda x: x.mean((1, 2, 3), keepdim=True),
    "one row": lambda x: x[:, :, 0].sum(),
    "one channel": lambda x: x[:, 0].sum(),
    "some rows": lambda x: x[:, :, 3:5].sum(),
    "every other row": lambda x: x[:, :, ::2].mean(),
    "rows by number": lambda x: x[:, :, [1, 3]].sum(),
    "channels by number": lambda x: x[:, [1, 3]].sum(),
    "index_select": lambda x: x.index_select(2, torch.tensor([1, 3])).sum(),
    "unbind": lambda x: x.unbind(2)[3].sum(),
    "split": lambda x: x.split(4, 2)[3].sum(),
    "chunk": lambda x: x.chunk(4, 2)[3].mean(),
    "diagonal": lambda x: x[0].diagonal(0, 1, 2).sum(),
    "median of rows": lambda x: x.median(2).values.sum(),
    "median of channels": lambda x: x.median(1).values.sum(),
    "median": lambda x: x.median(),
    "kthvalue": lambda x: x.kthvalue(2, 2).values.sum(),
    "mode": lambda x: x.mode(1).values.sum(),
    "max of rows": lambda x: x.max(2).values.sum(),
    "max of channels": lambda x: x.max(1).values.sum(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.amax((2, 3)).sum(),
    "sort": lambda x: x.sort(1).values[:, 0].sum(),
    "topk": lambda x: x.topk(2, 2).values.sum(),
    "gather": lambda x: x.gather(2, x.detach().argmax(2, True)).sum(),
    "masked": lambda x: x[x.detach() > 2].sum(),
    "norm": lambda x: x.norm(),
    "std": lambda x: x.std((2, 3)).sum(),
    "logsumexp": lambda x: x.logsumexp((1, 2, 3)).sum(),
    "cumsum": lambda x: x.cumsum(2)[:, :, -1].sum(),
    "one_hot": one_hot,
    "scatter_": scattered,
}


@dataclass(frozen=True)
class Case:
    """A function of a tensor that is sharded, and of others that are replicated."""

    name: str
    function: Function
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()
    dim: int = 0  # which is sharded, where only one is


def cases() -> list[Case]:
    """Each of another shape: where a gradient goes may depend on tensors of the same shape that were seen before."""
    few = [Case(f"few numbers: {name}", f, (2, 4, 64, 17 + n)) for n, (name, f) in enumerate(FEW_NUMBERS.items())]
    families = [
        Case(name, function, (2, 4, 48 + 2 * n, 32), others)
        for n, (name, (function, others)) in enumerate(FUNCTIONS.items())
        if name not in ("attention", "grid_sample")  # what these gather is below
    ]
    convolutions = [
        Case(f"dilation {d}, {groups} groups", dilated(d, groups), (2, 16, size, size), ((16, 16 // groups, 3, 3),))
        for d, size, groups in ((12, 64, 1), (24, 64, 16), (36, 48, 1), (40, 40, 1), (9, 48, 4))
    ]
    return [*few, *families, *convolutions]


CASES = {case.name: case for case in cases()}
ROW = (4096,)


def sampled(name: str, *grid: int) -> Case:
    """Of one sample with one channel, so that there is nothing but space to cut."""
    shape = (1, 1, *(16,) * len(grid))
    return Case(name, lambda x, grid: F.grid_sample(x, grid, align_corners=False), shape, ((1, *grid, len(grid)),), 2)


# What is gathered by decision, by the operator in whose row of the table it is said, and a call that does it.
DECIDED = {
    **{
        name: Case("few keys", lambda x: F.scaled_dot_product_attention(x, x, x), (1, 1, tokens, 128), dim=2)
        for tokens, name in ((32, "scaled_dot_product_attention"), (36, "attention"), (40, "attention_backward"))
    },
    "_fft_c2c": Case("fft", lambda x: torch.fft.fft(torch.complex(x, x)).real, ROW),
    "_fft_r2c": Case("rfft", lambda x: torch.fft.rfft(x).real, ROW),
    "_fft_c2r": Case("irfft", lambda x: torch.fft.irfft(torch.complex(x, x)), ROW),
    "grid_sampler_2d": sampled("2-d", 4, 4),
    "grid_sampler_2d_backward": sampled("2-d, backward", 5, 4),
    "grid_sampler_3d": sampled("3-d", 4, 4, 4),
    "grid_sampler_3d_backward": sampled("3-d, backward", 5, 4, 4),
    "view": Case("view", lambda x: x.view((2,) * 12), ROW),
    "_unsafe_view": Case("_unsafe_view", lambda x: torch.ops.aten._unsafe_view(x, (2,) * 12), ROW),
    "cummax": Case("cummax", lambda x: x.cummax(0).values, ROW),
    "cummin": Case("cummin", lambda x: x.cummin(0).values, ROW),
    "logcumsumexp": Case("logcumsumexp", lambda x: x.logcumsumexp(0), ROW),
    "median": Case("median", lambda x: x.median(0).values, ROW),
    "nanmedian": Case("nanmedian", lambda x: x.nanmedian(0).values, ROW),
    "mode": Case("mode", lambda x: x.mode(0).values, ROW),
    "poisson": Case("poisson", lambda x: x + torch.poisson(x.detach().abs()), ROW),
    "binomial": Case("binomial", lambda x: x + torch.binomial(x.detach().abs(), x.detach() * 0 + 0.5), ROW),
    "_standard_gamma": Case("gamma", lambda x: x + torch._standard_gamma(x.detach().abs() + 1), ROW),
    "_sample_dirichlet": Case("dirichlet", lambda x: x + torch._sample_dirichlet(x.detach().abs() + 1), ROW),
    **{
        name: Case(name, matrix, (64, 64))
        for name, matrix in {
            "_linalg_det": torch.linalg.det,
            "_linalg_slogdet": lambda x: torch.linalg.slogdet(x).logabsdet,
            "_linalg_solve_ex": lambda x: torch.linalg.solve(x, x),
            "_linalg_eigh": lambda x: torch.linalg.eigvalsh(x + x.mT),
            "_linalg_svd": torch.linalg.svdvals,
            "linalg_cholesky_ex": lambda x: torch.linalg.cholesky(x @ x.mT),
            "linalg_inv_ex": torch.linalg.inv,
            "linalg_lu_factor_ex": lambda x: torch.linalg.lu_factor(x)[0],
            "linalg_lu_solve": lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x.detach()), x),
            "linalg_matrix_exp": torch.linalg.matrix_exp,
            "linalg_qr": lambda x: torch.linalg.qr(x).R,
            "linalg_solve_triangular": lambda x: torch.linalg.solve_triangular(x, x, upper=True),
        }.items()
    },
    "multinomial": Case("multinomial", lambda x: x * (x.detach().abs() + 1).multinomial(2).sum(), ROW),
}
# The same of those that gather in compiled code only.
DECIDED_COMPILED: dict[str, Function] = {
    "kthvalue": lambda x: x.kthvalue(9, 0).values,
    "gather": lambda x: x.gather(0, x.detach().abs().long()),
}


def sizes(function: Function, tensors: Sequence[torch.Tensor]) -> Sizes:
    """Of the function and of its gradients."""
    with constants_allowed(), Sizes() as seen:
        outputs = tree_flatten(function(*tensors))[0]
    heads = [output for output in outputs if output.requires_grad]
    gradients = [torch.ones_like(head) for head in heads]
    with seen:
        torch.autograd.backward(heads, gradients)
    return seen


Seen = tuple[float, float, str]
"""The largest tensor made here, and what arrived at once, as parts of the largest of one process; and who made it."""


def measure(mesh: DeviceMesh, case: Case, at: tuple[Any, ...]) -> Seen:
    whole = [numbered(shape) for shape in (case.shape, *case.others)]
    one = sizes(case.function, [tensor.clone().requires_grad_() for tensor in whole])
    with convmesh.enable():
        placed = [place(t, mesh, at if n == 0 else ("R",) * mesh.ndim).requires_grad_() for n, t in enumerate(whole)]
        many = sizes(case.function, placed)
    largest = max(one.largest, whole[0].nbytes)
    return many.largest / largest, many.received_at_once / largest, many.maker


def measure_cases(mesh: DeviceMesh, at: tuple[Any, ...]) -> dict[str, Seen]:
    return {name: measure(mesh, case, at) for name, case in CASES.items()}


@pytest.mark.parametrize(("mesh", "at"), [((2,), (2,)), ((2, 2), (2, 3))])
def test_nothing_is_whole_on_a_rank(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    for by_name in pool.run(measure_cases, at, mesh=mesh):
        whole = {name: seen for name, seen in by_name.items() if max(seen[:2]) > LARGEST[math.prod(mesh)]}
        assert not whole


def measure_decided(mesh: DeviceMesh) -> dict[str, float]:
    """The greater of both, of what each operator makes or is sent."""
    found = {name: max(measure(mesh, case, (case.dim,))[:2]) for name, case in DECIDED.items()}
    return found | {name: arriving_compiled(mesh, function) for name, function in DECIDED_COMPILED.items()}


def arriving_compiled(mesh: DeviceMesh, function: Function) -> float:
    """Of a sharded row, what arrives at most. torch does not compile under a mode, but collectives can be watched."""
    row, arrived = numbered(ROW), [0]

    def see(operator: Any, args: tuple[Any, ...], group: Any) -> None:
        if "all_gather" in _torch.name_of(operator):
            arrived.append(args[0].nbytes * (group.size() - 1))

    with convmesh.enable():
        end = observe(see)
        torch.compile(function, backend="aot_eager", fullgraph=True)(place(row, mesh, (0,)))
        end()
    return max(arrived) / row.nbytes


def test_what_is_gathered_by_decision_is_in_the_table_and_nothing_else(pool: Pool) -> None:
    said = {operator for operator, behaviour in declared().items() if GATHERS.search(behaviour.communication)}
    assert {_torch.name_of(operator) for operator in said} == DECIDED.keys() | DECIDED_COMPILED.keys()
    by_rank = pool.run(measure_decided, mesh=(4,))
    stale = {name for name in by_rank[0] if max(seen[name] for seen in by_rank) < LARGEST[2]}
    assert not stale, "these are no longer gathered: correct the table"
