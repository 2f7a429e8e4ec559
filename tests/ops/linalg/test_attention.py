"""Attention over sharded tokens, against one process: keys and values are gathered or go round, and nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from convmesh.geometry import Interval
from convmesh.ops.linalg import attention as rule
from convmesh.ops.linalg import attention_blocks
from convmesh.ops.linalg.attention_blocks import visible
from tests.cases import place
from tests.compare import assert_close
from tests.gathers import Sizes
from tests.harness import Pool
from tests.ops.against_dense import Sharded, check

Tensor = torch.Tensor


@contextmanager
def going_round(shortest: int = 2) -> Iterator[None]:
    """However small keys and values are, in pieces of so many tokens."""
    with patch.object(rule, "GATHERED_BYTES", 0), patch.object(attention_blocks, "SHORTEST", shortest):
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: str) -> Tensor:
    """A mask is made of numbers that are given: what is negative is hidden, and the first query sees nothing."""
    mask = mask.detach()
    if kind == "bool":
        return F.scaled_dot_product_attention(q, k, v, mask > 0)
    if kind == "numbers":
        return F.scaled_dot_product_attention(q, k, v, mask.masked_fill(mask < -1, -torch.inf))
    return F.scaled_dot_product_attention(q, k, v, torch.where(mask > -9, -torch.inf, mask))


def attend_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias)


def attend_far_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The numbers of a token are far from each other in memory."""
    return F.scaled_dot_product_attention(*(t.transpose(2, 3) for t in (q, k, v)))


def check_round(mesh: DeviceMesh, case: Sharded) -> tuple[str, ...]:
    with going_round():
        return check(mesh, case)


def unmasked(at: tuple[Any, ...], keys_at: tuple[Any, ...], queries: int = 13, keys: int = 13) -> list[Sharded]:
    options: list[dict[str, Any]] = [{}, {"is_causal": True}, {"scale": 0.3}]
    tensors = ((2, 4, queries, 6), at), ((2, 4, keys, 6), keys_at), ((2, 4, keys, 6), keys_at)
    found = [Sharded(attend, tensors, (one,)) for one in options]
    fewer = tensors[0], ((2, 2, keys, 6), keys_at), ((2, 2, keys, 6), keys_at)
    found.append(Sharded(attend, fewer, ({"enable_gqa": True, "is_causal": True},)))
    if 3 not in at:
        found.append(Sharded(attend, (*tensors[:2], ((2, 4, keys, 3), keys_at)), ({},)))  # values of another size
        found.append(Sharded(attend, (*tensors[:2], ((2, 4, keys, 9), keys_at)), ({},)))
        # Of which torch's fused kernel would make NaN: one device takes none for these sizes.
        found.append(Sharded(attend, (*tensors[:2], ((2, 4, keys, 9), keys_at)), ({"is_causal": True, "scale": -1.0},)))
    return found


LENGTHS = [(13, 13), (13, 7), (5, 14), (3, 9), (9, 3)]


@pytest.mark.parametrize(("mesh", "at"), [((4,), (2,)), ((3,), (2,)), ((2, 2), (2, 2)), ((2, 2), (0, 2))])
def test_keys_go_round(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...]) -> None:
    """Uneven and empty shards, and lengths that differ, so that shards of queries and keys do not align."""
    cases = [case for lengths in LENGTHS for case in unmasked(at, at, *lengths)]
    for placements in pool.run_cases(check_round, cases, mesh=mesh, share=1 / 2):
        assert placements


def test_most_ranks_have_no_keys(pool: Pool) -> None:
    """Such keys do not go round, and are gathered however large they are."""
    places: list[tuple[Any, ...]] = [((2,), (2,), (0,)), ((2,), (2,), (2,)), ((2,), (0,), (2,)), (("R",), (2,), (1,))]
    for keys in (1, 2):
        cases = [
            Sharded(attend, (((3, 1, 3, 6), q), ((3, 1, keys, 6), k), ((3, 1, keys, 6), v)), (options,), gathers=True)
            for q, k, v in places
            for options in ({}, {"is_causal": True})
        ]
        pool.run_cases(check_round, cases, mesh=(4,))


def test_queries_and_keys_are_sharded_over_different_ranks(pool: Pool) -> None:
    places: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = [
        ((2, 2), ("R", 2)), ((2, 2), (2, "R")), (("R", 2), (2, "R")), ((2, 1), (2, 1)), (("R", "R"), (2, 2)),
        ((0, 1), (2, 2)), ((2, 2), (1, 0)), ((1, 3), (2, 3)), ((3, 3), (2, 2)), ((2, "P"), (2, "P")),
    ]  # fmt: skip
    cases = [case for queries, keys in places for case in unmasked(queries, keys, 11, 9)]
    cases = [Sharded(case.function, case.tensors, case.constants, gathers=True) for case in cases]
    pool.run_cases(check_round, cases, mesh=(2, 2))


def test_keys_are_gathered_where_they_are_few(pool: Pool) -> None:
    cases = [case for lengths in LENGTHS for case in unmasked((0, 2), (0, 2), *lengths)]
    pool.run_cases(check, [Sharded(c.function, c.tensors, c.constants, gathers=True) for c in cases], mesh=(2, 2))


@pytest.mark.parametrize("round_", [True, False])
def test_masks_by_parts(pool: Pool, round_: bool) -> None:
    found = []
    masks: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
        ((2, 4, 13, 11), (0, 2)), ((13, 11), ("R", 0)), ((13, 11), ("R", "R")), ((2, 1, 1, 11), (0, 3)),
        ((1, 1, 13, 11), ("R", 3)), ((2, 1, 13, 1), ("R", 2)), ((4, 13, 11), (0, "R")),
    ]  # fmt: skip
    for mask, mask_at in masks:
        for kind in ("bool", "numbers", "hidden"):
            tensors = ((2, 4, 13, 6), (0, 2)), ((2, 4, 11, 6), (0, 2)), ((2, 4, 11, 6), (0, 2)), (mask, mask_at)
            found.append(Sharded(attend_masked, tensors, (kind,), gathers=True))
    pool.run_cases(check_round if round_ else check, found, mesh=(2, 2))


def test_a_mask_that_has_a_gradient(pool: Pool) -> None:
    tensors = ((2, 4, 13, 6), (0, 2)), ((2, 4, 11, 6), (0, 2)), ((2, 4, 11, 6), (0, 2)), ((4, 13, 11), ("R", "R"))
    pool.run_cases(check_round, [Sharded(attend_biased, tensors, gathers=True)], mesh=(2, 2))


def test_other_numbers_of_dimensions(pool: Pool) -> None:
    cases = [
        Sharded(attend, tuple((shape, at) for shape in ((*outer, 13, 6), (*outer, 9, 6), (*outer, 9, 6))), (options,))
        for outer, at in [((), (0,)), ((4,), (1,)), ((2, 3, 2), (3,)), ((2, 3, 2), (1,))]
        for options in ({}, {"is_causal": True})
    ]
    cases += [Sharded(attend, (((3, 2, 5, 4), (2,)), ((1, 2, 7, 4), (2,)), ((1, 2, 7, 4), (2,))), ({},))]
    cases += [Sharded(attend_far_apart, tuple(((2, 4, 3, n), (3,)) for n in (7, 5, 5)))]
    pool.run_cases(check_round, [Sharded(c.function, c.tensors, c.constants, gathers=True) for c in cases], mesh=(2,))


def check_dropout(mesh: DeviceMesh, at: tuple[Any, ...]) -> None:
    def run(*given: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(*given, dropout_p=0.3)

    torch.manual_seed(0)
    dense = [torch.randn(2, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (13, 9, 9)]
    gradient = torch.randn(2, 2, 13, 4, dtype=torch.float64)
    expected = run(*dense)
    expected.backward(gradient)
    with convmesh.enable(), going_round():
        placed = [place(t.detach(), mesh, at).requires_grad_() for t in dense]
        made = run(*placed)
        made.backward(place(gradient, mesh, at))
        assert_close(made.full_tensor().detach(), expected.detach())
        for one, wanted in zip(placed, dense, strict=True):
            assert_close(one.grad.full_tensor(), wanted.grad)


def test_dropout_draws_the_numbers_of_one_device(pool: Pool) -> None:
    pool.run_cases(check_dropout, [(0, 2), (2, 2), (1, 2)], mesh=(2, 2))


def check_compiled(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense = [torch.randn(2, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 13, 13)]
    gradient = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    expected = attend(*dense, options)
    expected.backward(gradient)
    with convmesh.enable(), going_round():
        placed = [place(t.detach(), mesh, (2,)).requires_grad_() for t in dense]
        made = torch.compile(attend, backend="aot_eager", fullgraph=True)(*placed, options)
        made.backward(place(gradient, mesh, (2,)))
        assert_close(made.full_tensor().detach(), expected.detach())
        for one, wanted in zip(placed, dense, strict=True):
            assert_close(one.grad.full_tensor(), wanted.grad)


def test_compiled(pool: Pool) -> None:
    pool.run_cases(check_compiled, [{}, {"is_causal": True}], mesh=(4,))


def check_gradients_of_gradients(mesh: DeviceMesh) -> None:
    with convmesh.enable(), going_round():
        q, k, v = (place(torch.randn(1, 2, 8, 4), mesh, (2,)).requires_grad_() for _ in range(3))
        (first,) = torch.autograd.grad(attend(q, k, v, {}).sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="derivative"):
            torch.autograd.grad(first.square().sum(), k)


def test_gradients_of_gradients_are_refused_as_by_torch(pool: Pool) -> None:
    pool.run(check_gradients_of_gradients, mesh=(2,))


def check_sizes(mesh: DeviceMesh) -> tuple[float, float]:
    """Of all keys: what arrives at once, and the largest tensor of a rank."""
    tokens = 4096
    with convmesh.enable(), going_round(64):
        q, k, v = (place(torch.randn(1, 2, tokens, 8), mesh, (2,)).requires_grad_() for _ in range(3))
        with Sizes() as sizes:
            attend(q, k, v, {"is_causal": True}).sum().backward()
    whole = 2 * tokens * 8 * 4
    return sizes.received_at_once / whole, sizes.largest / whole


def test_nobody_holds_all_keys(pool: Pool) -> None:
    for received, largest in pool.run(check_sizes, mesh=(4,)):
        assert received <= 2 / 4 / 16
        assert largest <= 1 / 4


def check_random(mesh: DeviceMesh, seed: int) -> None:
    rng = random.Random(seed)
    batch, heads, queries, keys = rng.choice((1, 2, 3)), rng.choice((2, 4)), rng.randint(1, 20), rng.randint(1, 20)
    at: list[tuple[Any, ...]] = [tuple(rng.choice(["R", 0, 1, 2, 2, 2, 3]) for _ in range(mesh.ndim)) for _ in range(3)]
    shared = rng.choice((heads, heads, 2))
    tensors = [((batch, heads, queries, 4), at[0]), *(((batch, shared, keys, 4), place_) for place_ in at[1:])]
    options: dict[str, Any] = {"is_causal": rng.random() < 0.5, "enable_gqa": shared != heads}
    case = Sharded(attend, tuple(tensors), (options,), gathers=True)
    with going_round(rng.choice((1, 2, 3, 100))):
        check(mesh, case)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3,)])
def test_random_placements(pool: Pool, mesh: tuple[int, ...]) -> None:
    pool.run_cases(check_random, list(range(24)), mesh=mesh)


def lies_as_on_one_device(mesh: DeviceMesh) -> None:
    """The order of a larger tensor's dimensions in memory, its features' number, those of values, and options."""
    orders = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)]
    options: list[dict[str, Any]] = [{}, {"is_causal": True}, {"dropout_p": 0.5}]
    with convmesh.enable():
        for order, taken, width, given in product(orders, (8, 6), (8, 6, 4), options):

            def lay(t: Tensor, features: int, order: tuple[int, ...] = order) -> Tensor:
                back = [order.index(dim) for dim in range(4)]
                return t.permute(order).contiguous().permute(back)[..., :features]

            dense = [torch.randn(2, 4, tokens, 8) for tokens in (3, 6, 6)]
            features = taken, taken, width
            expected = attend(*map(lay, dense, features), given)  # type: ignore[arg-type]
            placed = [lay(place(t, mesh, (1,)), size) for t, size in zip(dense, features, strict=True)]
            actual = attend(*placed, given)  # type: ignore[call-arg, arg-type]
            assert actual.stride() == expected.stride(), (order, features, given)


def test_the_result_lies_as_on_one_device(pool: Pool) -> None:
    pool.run(lies_as_on_one_device, mesh=(2,))


def test_what_is_seen_of_causal_attention() -> None:
    for a, b, c, d in [
        (0, 3, 0, 3),
        (2, 7, 0, 9),
        (4, 9, 6, 8),
        (0, 4, 5, 9),
        (5, 9, 0, 4),
        (3, 3, 0, 4),
        (2, 9, 4, 4),
    ]:
        seen = torch.zeros(10, 10, dtype=torch.long)
        for queries, keys, causal in visible(Interval(a, b), Interval(c, d)):
            block = torch.ones(queries.size, keys.size, dtype=torch.long)
            seen[queries.start : queries.stop, keys.start : keys.stop] += block.tril() if causal else block
        expected = torch.zeros(10, 10, dtype=torch.long)
        expected[a:b, c:d] = torch.ones(10, 10, dtype=torch.long).tril()[a:b, c:d]
        assert torch.equal(seen, expected)
