"""Linear layers inside convolutional networks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.harness import Pool
from tests.ops.against_dense import Sharded, check


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def mixer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Tokens are the features: few go in, many come out."""
    return x + F.linear(F.gelu(F.linear(x, up)), down)


def convnext(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor,
    w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The block, without its depthwise convolution."""
    y = F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), scale, shift)
    return x + F.linear(F.gelu(F.linear(y, w1, b1)), w2, b2).permute(0, 3, 1, 2)


def squeeze_excite(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    squeezed = x.mean((2, 3))
    gate = F.linear(F.relu(F.linear(squeezed, w1)), w2).sigmoid()
    return x * gate[:, :, None, None]


def gate(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x * F.conv2d(x, w, b).sigmoid()


def head(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x.flatten(1), w, b)


def blocks(at: tuple[Any, ...], height: int = 5, width: int = 6) -> list[Sharded]:
    whole = ("R",) * len(at)
    x = ((3, 4, height, width), at)
    weights = tuple((shape, whole) for shape in ((4,), (4,), (8, 4), (8,), (4, 8), (4,)))
    return [
        Sharded(convnext, (x, *weights)),
        Sharded(gate, (x, ((1, 4, 1, 1), whole), ((1,), whole))),
        # What stock DTensor gathers there are N x C means, never the activation.
        Sharded(squeeze_excite, (x, ((2, 4), whole), ((4, 2), whole)), gathers=True),
    ]


def layers(at: tuple[Any, ...], weight: tuple[Any, ...], bias: tuple[Any, ...]) -> list[Sharded]:
    whole = ("R",) * len(at)
    made = [Sharded(linear, ((shape, at), ((4, 6), weight), ((4,), bias)))
            for shape in ((3, 5, 6), (3, 5, 2, 6), (2, 3, 5, 2, 6))]  # fmt: skip
    return [*made, Sharded(product, (((3, 5, 6), at), ((6, 4), weight)), gathers=weight != whole)]


@pytest.mark.parametrize(
    ("mesh", "at"),
    [((2,), (2,)), ((2,), (3,)), ((2,), (0,)), ((4,), (2,)), ((2, 2), (2, 3)), ((2, 2), (0, 3)), ((2, 2), (3, 3))],
)
def test_blocks_stay_sharded(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run_cases(check, blocks(at), mesh=mesh)


def test_fewer_features_than_ranks(pool: Pool) -> None:
    tensors = ((3, 5, 6), ("R",)), ((2, 6), (0,)), ((2,), (0,))
    pool.run_cases(check, [Sharded(linear, tensors)], mesh=(4,))


def test_few_features_that_are_sharded_are_resharded(pool: Pool) -> None:
    """Sums of many results would be as large as these on every rank."""
    whole = ("R", "R")
    pool.run_cases(check, [Sharded(mixer, (((2, 8, 6), (2,)), ((64, 6), whole[:1]), ((6, 64), whole[:1])))], mesh=(3,))
    pool.run_cases(check, [Sharded(mixer, (((2, 8, 6), (0, 2)), ((64, 6), whole), ((6, 64), whole)))], mesh=(2, 2))


def test_layers_of_any_rank(pool: Pool) -> None:
    places = [((1,), ("R",), ("R",)), ((0,), ("R",), ("R",)), (("P",), ("R",), ("R",)), (("R",), (0,), (0,))]
    pool.run_cases(check, [case for place in places for case in layers(*place)], mesh=(2,))
    pool.run_cases(check, layers((0, 1), ("R", "R"), ("R", "R")), mesh=(2, 2))


def heads(at: tuple[Any, ...]) -> list[Sharded]:
    """Where features are cut, the weight's gradient is gathered, because the weight is replicated."""
    whole = ("R",) * len(at)
    weights = ((4, 72), whole), ((4,), whole)
    shapes = ((3, 4, 3, 6), (2, 2, 6, 6), (3, 3, 4, 6), (1, 4, 3, 6))
    return [Sharded(head, ((s, at), *weights), gathers=1 in (*at, s[0]) or len(at) > 1) for s in shapes]


@pytest.mark.parametrize(("mesh", "at"), [((2,), (3,)), ((2,), (2,)), ((2,), (0,)), ((2,), (1,)), ((2, 2), (2, 3))])
def test_heads_of_flattened_space(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    pool.run_cases(check, heads(at), mesh=mesh)


def tokens(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x.flatten(2).transpose(1, 2), w, b)


def test_pixels_that_become_tokens_stay_cut(pool: Pool) -> None:
    """Along the tokens, not along channels, which a linear layer would have to sum over the ranks."""
    whole = ("R", "R")
    cases = [Sharded(tokens, (((n, 6, 4, 6), (0, 3)), ((4, 6), whole), ((4,), whole))) for n in (1, 2)]
    for placements in pool.run_cases(check, cases, mesh=(2, 2)):
        assert placements[0] == ("(Shard(dim=0), Shard(dim=1))",)


def check_dense(mesh: DeviceMesh, case: tuple[bool, tuple[Any, ...]]) -> None:
    channels_last, at = case
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    whole = torch.zeros(2, 4, 10, 6, dtype=torch.float64).contiguous(memory_format=memory_format)
    with convmesh.enable():
        flat = place(whole, mesh, at).flatten(2)
        back = flat.view(whole.shape)
    for viewed, dense in ((flat, whole.flatten(2)), (back, whole)):
        assert viewed.stride() == dense.stride()
        order = sorted(range(dense.dim()), key=lambda dim: -dense.stride(dim))
        assert viewed.to_local().permute(order).is_contiguous()


def test_a_view_that_had_to_move_lies_as_its_strides_say(pool: Pool) -> None:
    """Views of it are made by these, and random numbers drawn; they are those of one device."""
    places = ((2, 2), (0, 2), (3, 3), (2, 3), (0, 3))
    pool.run_cases(check_dense, [(last, at) for last in (False, True) for at in places], mesh=(2, 2))


def _derived_twice(mesh: DeviceMesh) -> None:
    """Of a layer on sharded space, features, and both; by a penalty of the gradient, which derives it once more."""
    convmesh.enable()
    torch.manual_seed(0)
    tensors = [torch.randn(size).double() for size in ((3, 5, 4, 6), (5, 6), (5,))]
    for at in ((1, None), (1, 2), (2, 3), (3, None)):
        for of_weight in ((None, None), (0, None), (None, 1)):
            of_bias = tuple(0 if dim == 0 else None for dim in of_weight)
            given = [one.clone().requires_grad_() for one in tensors]
            places = zip(tensors, (at, of_weight, of_bias), strict=True)
            placed = [place(one.clone(), mesh, where).requires_grad_() for one, where in places]
            found = []
            for some in (given, placed):
                y = linear(*some)
                first = torch.autograd.grad(y.square().sum(), some, create_graph=True)
                second = torch.autograd.grad(sum(one.square().sum() for one in first), some)
                found.append([y, *first, *second])
            for right, one in zip(*found, strict=True):
                torch.testing.assert_close(one.full_tensor(), right)
            assert type(y.grad_fn).__name__ == "LinearBackward0"  # one node, and no views around it


def test_a_layer_is_one_operator_and_can_be_derived_twice() -> None:
    convmesh.simulate(_derived_twice, mesh=(2, 2), names=("a", "b"))


def _unfit(mesh: DeviceMesh) -> None:
    x, w = place(torch.ones(2, 3, 8), mesh, (2,)), place(torch.ones(4, 8), mesh, (1,))
    for bias in (torch.ones(4, dtype=torch.float64), torch.ones(3)):
        with convmesh.enable(), pytest.raises(convmesh.ShardingError, match=r"dtypes differ|bias of shape \(3,\)"):
            F.linear(x, w, place(bias, mesh, ("R",)))


def test_a_bias_that_does_not_fit_is_refused_on_all_ranks() -> None:
    """Only one rank adds it."""
    convmesh.simulate(_unfit, 2)
