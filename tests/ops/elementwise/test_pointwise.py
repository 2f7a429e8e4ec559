"""Elementwise operators, and what networks make of them, against one process and without gathering."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool
from tests.ops.against_dense import Sharded, check_elements

SHAPE = (2, 3, 5, 7)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.addcdiv(x - 2 * y, x, y.square() + 1, value=0.5)


def chosen(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > y, torch.maximum(x, y), x.lerp(y, 0.3)).masked_fill(x < 0, 0.25)


def in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).clamp_(-1, 1).mul_(y).div_(2).add_(y, alpha=3).exp_()


def activations(x: torch.Tensor) -> torch.Tensor:
    made = [F.silu(x), F.gelu(x), F.hardswish(x), F.elu(x), F.softplus(x), F.hardtanh(x), F.leaky_relu(x), F.mish(x)]
    made += [F.hardsigmoid(x), F.selu(x), F.celu(x), F.relu6(x), F.softsign(x), F.tanhshrink(x), F.softshrink(x)]
    made += [F.logsigmoid(x), F.hardshrink(x), F.threshold(x, 0.1, 20.0)]
    return sum(made, torch.sigmoid(x) * torch.tanh(x) + F.relu(x).sqrt().double())


def numbers_beside(x: torch.Tensor) -> torch.Tensor:
    return (2 - x) * torch.tensor(3.0) / 4 + x**2 + torch.tensor([[0.5]], dtype=torch.float64)


def gated(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return F.glu(x, dim) + F.prelu(x, y).narrow(dim, 0, 2)


ONE: list[Callable[..., Any]] = [activations, numbers_beside]
TWO: list[Callable[..., Any]] = [multiply, scaled, chosen, in_place]
GATE, ROW, CHANNEL = (2, 3, 1, 1), (1, 1, 5, 1), (3, 1, 1)
# Over 4 ranks 5 rows leave one rank without any, and 3 channels too.
PAIRS: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (2,): [
        ((2,), SHAPE, (2,)), ((3,), SHAPE, ("R",)), ((3,), GATE, ("R",)), ((3,), GATE, (1,)), ((2,), ROW, ("R",)),
        ((2,), ROW, (2,)), ((2,), SHAPE, (3,)), (("P",), SHAPE, (2,)), (("P",), GATE, ("R",)), (("P",), SHAPE, ("P",)),
        ((1,), CHANNEL, (0,)), ((0,), CHANNEL, ("R",)),
    ],
    (4,): [
        ((2,), SHAPE, (2,)), ((2,), GATE, ("R",)), ((1,), CHANNEL, ("R",)), ((2,), ROW, ("R",)), ((0,), SHAPE, (0,)),
    ],
    (2, 2): [
        ((2, 3), GATE, ("R", "R")), ((2, 2), ROW, ("R", "R")), ((2, 2), SHAPE, (2, "R")), ((0, 2), GATE, (0, "R")),
        ((2, 3), SHAPE, ("P", 3)), (("P", 2), SHAPE, ("P", 2)), ((2, 3), SHAPE, (2, 1)), ((2, 2), SHAPE, ("P", "P")),
    ],
}  # fmt: skip


def gathers(function: Callable[..., Any], at: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Channels of a small operand that rows of the other need all of."""
    return other == (1,)


@pytest.mark.parametrize("mesh", PAIRS)
def test_operands_in_any_placement(pool: Pool, mesh: tuple[int, ...]) -> None:
    cases = [
        Sharded(function, ((SHAPE, at), (shape, other)), gathers=gathers(function, at, other))
        for function in TWO
        for at, shape, other in PAIRS[mesh]
    ]
    cases += [Sharded(function, ((SHAPE, at),)) for function in ONE for at in {pair[0] for pair in PAIRS[mesh]}]
    even, slopes = (4, 3, 4, 4), ((3,), ("R",) * len(mesh))
    cases += [Sharded(gated, ((even, (2, 3)[: len(mesh)]), slopes), (dim,)) for dim in (0, 2, 3)]
    pool.run_cases(check_elements, cases, mesh=mesh)


def squeeze_excite(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    squeezed = F.adaptive_avg_pool2d(x, 1)
    return x * torch.sigmoid(F.conv2d(F.silu(F.conv2d(squeezed, down)), up))


def attention_gate(x: torch.Tensor, g: torch.Tensor, w: torch.Tensor, psi: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(F.conv2d(F.relu(F.conv2d(x, w) + F.conv2d(g, w)), psi))


def dropouts(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    y = F.dropout(x, 0.4) + F.dropout2d(x, 0.5) + F.alpha_dropout(x, 0.3, True) + F.feature_alpha_dropout(x, 0.3, True)
    return y + F.dropout3d(x.unsqueeze(0), 0.5).squeeze(0)


def similar(x: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    return F.cosine_similarity(x, y, dim)


def normalized(x: torch.Tensor, dim: int) -> torch.Tensor:
    return F.normalize(x, dim=dim) + x.norm(2) + torch.linalg.vector_norm(x, 3, (1, 2), keepdim=True)


def expanded(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.narrow(dim, 0, 1).expand(2, 3, 5, 7).mul(2) + x.narrow(dim, 0, 1).expand_as(x)


def response(x: torch.Tensor) -> torch.Tensor:
    return F.local_response_norm(x, 3) + F.local_response_norm(x, 2, k=2.0)


def powers_pooled(x: torch.Tensor) -> Any:
    deep = F.lp_pool3d(x.unsqueeze(1).abs() + 0.1, 2, 2)
    flat = x.abs() + 0.1
    return F.lp_pool2d(flat, 3, 2), F.lp_pool2d(flat, 2, (3, 2), stride=1), F.lp_pool1d(flat[0], 2, 3), deep


def blocks(at: tuple[Any, ...]) -> list[Sharded]:
    # Four times as small as a real one: with fewer rows than ranks, and unevenly cut.
    whole = ("R",) * len(at)
    x = ((2, 4, 3, 7), at)
    w = [((4, 4, 1, 1), whole), ((1, 4, 1, 1), whole)]
    gates = [Sharded(squeeze_excite, (x, w[0], w[0])), Sharded(attention_gate, (x, x, *w)), Sharded(dropouts, (x,))]
    y = (SHAPE, at)
    made = [Sharded(similar, (y, y), (dim,)) for dim in (1, 2, 3)]
    made += [Sharded(normalized, (y,), (dim,)) for dim in (1, 2)]
    made += [Sharded(expanded, (y,), (dim,)) for dim in (1, 2)]
    return [*gates, *made, Sharded(response, (((2, 5, 3, 7), at),)), Sharded(powers_pooled, (((2, 4, 6, 7), at),))]


@pytest.mark.parametrize(
    ("mesh", "places"), [((2,), [(2,), (3,), (0,)]), ((4,), [(2,)]), ((2, 2), [(0, 2), (2, 3), (2, 2)])]
)
def test_blocks_of_networks(pool: Pool, mesh: tuple[int, ...], places: list[Any]) -> None:
    pool.run_cases(check_elements, [case for at in places for case in blocks(at)], mesh=mesh)


def pending(mesh: DeviceMesh) -> None:
    """Tensors stay Partial through linear operators and writes; for all others they are reduced once."""
    values = torch.arange(-12, 12, dtype=torch.float64).view(2, 3, 4)
    with convmesh.enable(), CommDebugMode() as traffic:
        x, weight = place(values, mesh, ("P",)), place(values + 20, mesh, ("R",))
        linear = (-(x + x) * 2 * weight / weight).clone().float().double().addcmul(x, weight)
        assert linear.placements == (Partial(),)
        assert traffic.get_total_counts() == 0
        shared = x.view(-1)
        x.clamp_(-3, 3)
        alone = place(values, mesh, ("P",)).clone()
        alone.sqrt_().nan_to_num_(5.0).mul_(weight)
        assert x.placements == alone.placements == (Partial(),)
        assert traffic.get_total_counts() == 2
    assert_close(linear.full_tensor(), -4 * values + values * (values + 20))
    assert_close(x.full_tensor(), values.clamp(-3, 3))
    assert_close(shared.full_tensor(), values.clamp(-3, 3).view(-1))
    assert_close(alone.full_tensor(), values.sqrt().nan_to_num(5.0) * (values + 20))


def infinite(mesh: DeviceMesh) -> None:
    """Terms of a sum have other signs than the sum: multiplied by infinity, or divided by zero, they do not add up."""
    values = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    terms = [values - 3, torch.full_like(values, 3), torch.zeros_like(values)]
    with convmesh.enable():
        for scale in (lambda x: x * torch.inf, lambda x: x / 0, lambda x: x.mul_(-torch.inf), lambda x: x.div_(0.0)):
            x = DTensor.from_local(terms[mesh.get_rank()].clone(), mesh, [Partial()])
            assert_close(scale(x).full_tensor(), scale(values.clone()))


def test_partial_sums(pool: Pool) -> None:
    pool.run(pending, mesh=(2,))
    pool.run(infinite, mesh=(3,))


def types(mesh: DeviceMesh) -> None:
    whole = torch.arange(-3, 4)
    with convmesh.enable():
        x = place(whole, mesh, (0,))
        for made, expected in (
            (x * 2.5, whole * 2.5), (x / 2, whole / 2), (x > 0, whole > 0), (x // 2, whole // 2),
            (x.bool() | (x > 2), whole.bool() | (whole > 2)), (2**x.abs(), 2**whole.abs()),
            (x + torch.tensor(1.5, dtype=torch.float64), whole + torch.tensor(1.5, dtype=torch.float64)),
            (x.half() * torch.tensor(2.0), whole.half() * 2.0), (x.to(torch.bfloat16), whole.to(torch.bfloat16)),
            (torch.where(x > 0, 1.0, 0), torch.where(whole > 0, 1.0, 0)),
        ):  # fmt: skip
            assert made.dtype == expected.dtype
            assert made.placements == (Shard(0),)
            assert_close(made.full_tensor(), expected)
        last = place(torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), mesh, (2,))
        for made in (last * 2, last + last, last.clone(), last * place(torch.rand(3, 1, 1), mesh, ("R",))):
            assert made.is_contiguous(memory_format=torch.channels_last)
            assert made.to_local().is_contiguous(memory_format=torch.channels_last)
        assert last.clone(memory_format=torch.contiguous_format).is_contiguous()
        with pytest.raises(convmesh.ShardingError, match="plain"):
            x + whole
        with pytest.raises(RuntimeError, match="broadcast"):
            x + place(torch.ones(5), mesh, (0,))
        with pytest.raises(RuntimeError, match="cast"):
            x.mul_(0.5)


def test_types_and_memory_formats(pool: Pool) -> None:
    pool.run(types, mesh=(2,))


def steps(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    y = F.silu(x * s) + torch.where(x > 0, s, x)
    y.clamp_(max=2.0)
    return y.relu_() * 3 - s / 2


def compiled(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    x, s = torch.randn(SHAPE, dtype=torch.float64), torch.randn(GATE, dtype=torch.float64)
    x_dense, s_dense = x.clone().requires_grad_(), s.clone().requires_grad_()
    steps(x_dense, s_dense).square().sum().backward()
    with convmesh.enable():
        x, s = place(x, mesh, at).requires_grad_(), place(s, mesh, ("R",) * len(at)).requires_grad_()
        torch.compile(steps, fullgraph=True, backend="aot_eager")(x, s).square().sum().backward()
        for actual, expected in ((x.grad, x_dense.grad), (s.grad, s_dense.grad)):
            assert isinstance(actual, DTensor)
            assert_close(actual.full_tensor(), expected)


def test_compiled(pool: Pool) -> None:
    pool.run_cases(compiled, [(2,), (3,)], mesh=(4,))


def outside(mesh: DeviceMesh) -> None:
    with convmesh.enable(), torch.inference_mode():
        x = place(torch.arange(6.0).view(2, 3), mesh, (1,))
        y = place(torch.ones(3), mesh, ("R",))
        expected = (torch.arange(6.0).view(2, 3) + 1).square().clip(0, 9)
        assert_close((x * y + 1).square().clip(0, 9).full_tensor(), expected)


def test_inference_on_part_of_the_ranks(pool: Pool) -> None:
    pool.run(outside, mesh=(2,), ranks=(1, 3))
