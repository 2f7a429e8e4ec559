"""Normalisations against one process: training, evaluation, running statistics, and every way to cut the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from tests.harness import Pool
from tests.ops.against_dense import Sharded
from tests.ops.against_dense import check as check_dense
from tests.ops.agreement import Sample, agree

Function = Callable[..., Any]


def _evaluated(x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, w, b, False, 0.1, 1e-3)


def _trained(x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, var: torch.Tensor) -> Any:
    y = F.batch_norm(x, mean, var, w, b, True, 0.3)
    return y, mean, var


def _instances(x: torch.Tensor, w: Any, b: Any, mean: torch.Tensor, var: torch.Tensor) -> Any:
    y = F.instance_norm(x, mean, var, w, b, True, 0.3)
    return y, mean, var


BY_CHANNEL: dict[str, Function] = {
    "batch norm": lambda x, w, b, *_: F.batch_norm(x, None, None, w, b, True),
    "batch norm without parameters": lambda x, w, b, *_: F.batch_norm(x, None, None, None, None, True),
    "batch norm with statistics": _trained,
    "batch norm in evaluation": _evaluated,
    "instance norm": lambda x, w, b, *_: F.instance_norm(x, None, None, w, b),
    "instance norm with statistics": _instances,
    "instance norm in evaluation": lambda x, w, b, m, v: F.instance_norm(x, m, v, w, b, False),
    "group norm": lambda x, w, b, *_: F.group_norm(x, 2, w, b),
    "group norm of one": lambda x, w, b, *_: F.group_norm(x, 1, w, b),
    "group norm of many": lambda x, w, b, *_: F.group_norm(x, 6, w, b),
    "group norm without parameters": lambda x, w, b, *_: F.group_norm(x, 3),
}
BY_SHAPE: dict[str, Function] = {
    "layer norm": lambda x, w, b: F.layer_norm(x, w.shape, w, b),
    "layer norm of the last": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w[0], b[0]),
    "layer norm without parameters": lambda x, w, b: F.layer_norm(x, x.shape[1:]),
    "layer norm without bias": lambda x, w, b: F.layer_norm(x, w.shape, w),
    "rms norm": lambda x, w, b: F.rms_norm(x, w.shape, w),
    "rms norm without weight": lambda x, w, b: F.rms_norm(x, x.shape[1:]),
}
PLACES = {
    (2,): [(0,), (1,), (2,), (3,), ("P",), ("R",)],
    (4,): [(0,), (1,), (3,)],
    (1, 2): [(0, 2), (3, 3), (1, 1)],
    (2, 2): [(0, 2), (0, 1), (1, 3), (2, 3), (2, 2), (1, 1), ("P", 3), (3, "R")],
}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_channel(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], bool]) -> None:
    """Batch 5 and width 5 leave a rank of four without any, and 6 channels cut groups."""
    name, at, shards_parameters = case
    tensors = [numbers(5, 6, 4, 5), *(numbers(6, seed=seed) for seed in (1, 2, 3)), numbers(6, seed=4).square()]
    channels = tuple(0 if shards_parameters and place == 1 else "R" for place in at)
    sample = Sample(tensors, [at, *[channels] * 4], [True, True, True, False, False])
    taken = agree(mesh, BY_CHANNEL[name], sample)
    if len(at) == 1 and at != ("P",) and name != "instance norm with statistics":
        assert sum(taken.values()) <= 2, f"one message forward and one backward, not {taken}"


def by_shape(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    name, at = case
    tensors = [numbers(5, 6, 4, 5), numbers(4, 5, seed=1), numbers(4, 5, seed=2)]
    agree(mesh, BY_SHAPE[name], Sample(tensors, [at, *[("R",) * len(at)] * 2], [True, True, True]))


@pytest.mark.parametrize("mesh", PLACES)
def test_norms_by_channel_agree_with_one_process(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [(name, at, bool(number % 2)) for name in BY_CHANNEL for number, at in enumerate(PLACES[mesh])]
    pool.run_cases(by_channel, cases, mesh=mesh, share=1 / 2)


@pytest.mark.parametrize("mesh", PLACES)
def test_norms_by_shape_agree_with_one_process(pool: Pool, mesh: tuple[int, ...]) -> None:
    # Where RMS norm is made of others, the square of a pending sum is torch's own to place.
    cases = [(name, at) for name in BY_SHAPE for at in PLACES[mesh] if "P" not in at or "rms" not in name]
    pool.run_cases(by_shape, cases, mesh=mesh, share=1 / 2)


def _of_channels_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x.permute(0, 3, 1, 2)
    return F.group_norm(y, 2, w, b) + F.instance_norm(y, None, None, w, b)


def test_norms_of_few_samples_with_channels_innermost(pool: Pool) -> None:
    cases = [
        Sharded(_of_channels_last, (((n, 6, 5, 4), at), ((4,), ("R", "R")), ((4,), ("R", "R"))))
        for n in (1, 2)
        for at in ((1, 2), (0, 1), ("R", 2), (1, 1))
    ]
    pool.run_cases(check_dense, cases, mesh=(2, 2))


def _of_tokens(x: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x.transpose(1, 2).unflatten(2, (5, 6)), 2)


def test_group_norm_of_tokens_seen_as_an_image(pool: Pool) -> None:
    """A part with one sample has a stride along the batch that says nothing of its memory format."""
    cases = [Sharded(_of_tokens, (((n, 30, 6), at),)) for n in (1, 2) for at in ((0, 1), (0, "R"), ("R", 1))]
    pool.run_cases(check_dense, cases, mesh=(2, 2))
