"""Random operators draw what one device draws, however the tensor is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from convmesh.ops.random import bernoulli, replicated_draw
from tests.cases import place, places_of
from tests.compare import assert_close, same_on_all_ranks
from tests.harness import Pool

PLACES: dict[tuple[int, ...], list[tuple[Any, ...]]] = {
    (4,): [("R",), (0,), (1,), (2,), ("P",)],
    (2, 2): [(0, 2), (2, 3), (3, 3), ("P", 2), ("R", 1)],
}
SHAPE = (3, 4, 7, 5)

OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout, not in training": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "rand_like": lambda x: x * 0 + torch.rand_like(x),
    "randn_like": lambda x: x * 0 + torch.randn_like(x),
    "randint_like": lambda x: x * 0 + torch.randint_like(x, 3, 9),
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli with p": lambda x: x * torch.bernoulli(x.detach(), 0.4),
    "bernoulli_ with a tensor": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "uniform_": lambda x: x * torch.zeros_like(x).uniform_(-1, 2),
    "normal_": lambda x: x * torch.zeros_like(x).normal_(1, 2),
    "poisson": lambda x: x * torch.poisson(x.detach().abs()),
    "binomial": lambda x: x * torch.binomial(x.detach().abs().round() + 3, x.detach().sigmoid()),
    "gamma": lambda x: x * torch._standard_gamma(x.detach().abs() + 0.1),
    "dirichlet": lambda x: x * torch._sample_dirichlet(x.detach().abs() + 0.1),
    "multinomial": lambda x: x * torch.multinomial(x.detach().abs().flatten(1).sum(0), 5).sum(),
    "normal of a turned tensor": lambda x: x + torch.normal(x.detach().mT[:, :, 1:], 1.0).mean(),
    "in inference mode": lambda x: in_inference_mode(x),
}

BY_VALUE = ("poisson", "binomial", "gamma", "dirichlet", "multinomial")


def in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = F.dropout(x, 0.3)
    return x * 0 + y.clone()


def drawn(operator: str, x: torch.Tensor, mesh: DeviceMesh | None = None) -> tuple[torch.Tensor, ...]:
    """The result, the gradient, and what is drawn next."""
    torch.manual_seed(5)
    x = x.detach().requires_grad_()
    y = OPERATORS[operator](x)
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(SHAPE)
    y.backward(weight if mesh is None else place(weight, mesh, places_of(y)))
    assert x.grad is not None
    return y.detach(), x.grad, torch.rand(2)


def check(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...]]) -> None:
    operator, at = case
    value = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, gradient, after = drawn(operator, value)
    with convmesh.enable(), CommDebugMode() as communication:
        mine = drawn(operator, place(value, mesh, at), mesh)
    # torch's own product of uneven shards with a smaller tensor, its softmax, and its sigmoid of a pending sum gather.
    if not any(word in operator for word in ("softmax", "tensor", "2d", "feature", *BY_VALUE)):
        counts = communication.get_comm_counts()
        assert not any("gather" in str(kind) for kind in counts), counts
    assert_close(mine[0].full_tensor(), y)
    assert_close(mine[1].full_tensor(), gradient)
    assert torch.equal(mine[2], after), "the generator is where it is on one device"


@pytest.mark.parametrize("mesh", PLACES)
def test_the_numbers_of_one_device(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check, [(operator, at) for operator in OPERATORS for at in PLACES[mesh]], mesh=mesh, share=1 / 2)


def in_blocks(mesh: DeviceMesh, case: tuple[tuple[Any, ...], int, bool]) -> None:
    at, size, channels_last = case
    value = torch.rand(SHAPE)
    value = value.contiguous(memory_format=torch.channels_last) if channels_last else value
    torch.manual_seed(5)
    expected = torch.empty_like(value).bernoulli_(0.3)
    after = torch.rand(2)
    with pytest.MonkeyPatch.context() as patch, convmesh.enable():
        patch.setattr(bernoulli, "BLOCK", size)
        torch.manual_seed(5)
        found = torch.empty_like(place(value, mesh, at)).bernoulli_(0.3)
    assert torch.equal(torch.rand(2), after), "the generator is where it is on one device"
    assert torch.equal(found.full_tensor(), expected)


def test_a_tensor_may_be_drawn_in_blocks(pool: Pool) -> None:
    """Of one element, of parts of a row, of rows and more."""
    for mesh, places in PLACES.items():
        cases = [(at, size, last) for at in places for size in (1, 3, 5, 30, 64) for last in (False, True)]
        pool.run_cases(in_blocks, cases, mesh=mesh)


def channels_last(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    value = torch.ones(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    torch.manual_seed(2)
    expected = F.dropout(value)
    torch.manual_seed(2)
    with convmesh.enable():
        assert_close(F.dropout(place(value, mesh, at)).full_tensor(), expected)


def test_channels_last_draws_in_its_own_order(pool: Pool) -> None:
    pool.run_cases(channels_last, PLACES[2, 2], mesh=(2, 2))


def after_another_format(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    """DTensor's own rule of `empty_like` and its kin gives every memory format the strides of the first."""
    value = torch.randn(SHAPE, dtype=torch.float64)
    formats = (torch.contiguous_format, torch.preserve_format, torch.channels_last)
    makers = (torch.empty_like, torch.zeros_like, torch.ones_like, lambda x, **named: torch.full_like(x, 2, **named))
    with convmesh.enable():
        turned, dense = place(value, mesh, at).transpose(1, 2), value.transpose(1, 2)
        for make in makers:
            for format in (*formats, *reversed(formats)):
                like, expected = make(turned, memory_format=format), make(dense, memory_format=format)
                assert like.stride() == expected.stride()
                torch.manual_seed(3)
                expected.exponential_()
                torch.manual_seed(3)
                assert_close(like.exponential_().full_tensor(), expected)


def test_new_tensors_have_the_strides_of_their_own_memory_format(pool: Pool) -> None:
    for mesh, places in PLACES.items():
        pool.run_cases(after_another_format, places, mesh=mesh)


def tiles(mesh: DeviceMesh, at: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """With a limit so low that everything is drawn in tiles."""
    before, replicated_draw.LARGEST_DRAWN = replicated_draw.LARGEST_DRAWN, 100
    try:
        torch.manual_seed(3)
        with convmesh.enable():
            x = torch.rand_like(place(torch.ones(2, 70, 3, 65), mesh, at))
            return x.full_tensor(), torch.rand(2)
    finally:
        replicated_draw.LARGEST_DRAWN = before


def test_tiles_do_not_depend_on_the_sharding(pool: Pool) -> None:
    results = [pool.run(tiles, at, mesh=(4,)) for at in [("R",), (0,), (1,), (3,)]]
    results += [pool.run(tiles, at, mesh=(2, 2)) for at in [(1, 3), (3, 3), ("P", 1)]]
    whole, _ = same_on_all_ranks([result for by_rank in results for result in by_rank])
    assert abs(whole.double().mean().item() - 0.5) < 0.02
    flat = whole.reshape(2, 70, -1)
    assert not torch.equal(flat[:, :9], flat[:, 9:18]), "tiles differ from each other"


def rrelu(mesh: DeviceMesh, at: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    value = torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(4)
    with convmesh.enable():
        x = place(value, mesh, at).requires_grad_()
        y = F.rrelu(x, training=True)
        y.sum().backward()
        out, gradient = y.detach().full_tensor(), x.grad.full_tensor()
    assert_close(out[value > 0], value[value > 0])
    assert_close(out, value * gradient)
    slopes = gradient[value < 0]
    assert slopes.min() >= 1 / 8
    assert slopes.max() <= 1 / 3
    assert slopes.unique().numel() > slopes.numel() // 2
    return out, gradient


def test_rrelu(pool: Pool) -> None:
    results = [pool.run(rrelu, at, mesh=(4,)) for at in [("R",), (0,), (2,), ("P",)]]
    one = results[0][0]
    for by_rank in results:
        for out, gradient in by_rank:
            assert_close(out, one[0])
            assert_close(gradient, one[1])


def compiled(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    value = torch.ones(SHAPE)
    torch.manual_seed(6)
    expected = F.dropout(value)
    torch.manual_seed(6)
    with convmesh.enable():
        step = torch.compile(lambda x: F.dropout(x), fullgraph=True, backend="aot_eager")
        assert_close(step(place(value, mesh, at)).full_tensor(), expected)


def test_under_compile(pool: Pool) -> None:
    pool.run(compiled, (2,), mesh=(2,))
