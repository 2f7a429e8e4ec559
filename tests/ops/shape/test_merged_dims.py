"""A feature map that becomes tokens, and a feature map again, is sharded as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close

Tensor = torch.Tensor


def attend(tokens: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(tokens, tokens, tokens)


def plainly(x: Tensor) -> Tensor:
    return attend(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)


def with_one_head(x: Tensor) -> Tensor:
    """As many dimensions before as after: a new one of size 1 is there instead of the merged one."""
    tokens = x.reshape(x.shape[0], 1, x.shape[1], -1).permute(0, 1, 3, 2).contiguous()
    return attend(tokens).squeeze(1).permute(0, 2, 1).reshape(x.shape)


def with_heads(x: Tensor) -> Tensor:
    """As many dimensions before as after: channels are split where height and width are merged."""
    tokens = x.reshape(x.shape[0], 2, x.shape[1] // 2, -1).transpose(2, 3)
    return attend(tokens).transpose(2, 3).reshape(x.shape)


def step_by_step(x: Tensor) -> Tensor:
    """A video: height and width are merged first, then time with them, and all are split at once."""
    frames = x.unsqueeze(0).flatten(3).permute(0, 1, 3, 2)
    tokens = attend(frames.flatten(1, 2))
    return tokens.unflatten(1, (x.shape[0], *x.shape[2:])).permute(0, 1, 4, 2, 3).squeeze(0)


def on_ranks(mesh: DeviceMesh, x: Tensor, work: Callable[[Tensor], Tensor]) -> None:
    with convmesh.enable():
        given = place(x.detach(), mesh, (2, 3)).requires_grad_()
        made = work(given) * 2
        assert made.placements == given.placements, made.placements
        made.square().mean().backward()
        dense = x.detach().requires_grad_()
        expected = work(dense) * 2
        expected.square().mean().backward()
        assert given.grad is not None
        assert_close(made.full_tensor(), expected)
        assert_close(given.grad.full_tensor(), dense.grad)


@pytest.mark.parametrize("batch", [1, 4])  # four samples are enough for the tokens' place to be taken by the batch
@pytest.mark.parametrize("work", [plainly, with_one_head, with_heads, step_by_step])
def test_a_feature_map_is_sharded_as_before(work: Callable[[Tensor], Tensor], batch: int) -> None:
    x = torch.randn(batch, 4, 6, 10, dtype=torch.float64)
    convmesh.simulate(lambda mesh: on_ranks(mesh, x, work), mesh=(2, 2), names=("h", "w"))
