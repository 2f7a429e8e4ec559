"""The rules of attention, forward and backward: batch, heads, queries and keys, each over ranks of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Shard

from ... import _torch
from ...comm import all_reduce, rank_line
from ...kernels.attention import sums_in
from ...sharding.call import Call, Moved
from ...sharding.errors import Unfit
from ...sharding.layout import Layout
from ...sharding.plan_rule import plan_rule
from ...sharding.sharding_table import Assignment, P, R, Row, choose, input_placements
from ..indexing.common import leaves_ranks_empty
from . import attention
from .attention import ATTENTION, backward_operator, forward_operator
from .attention_blocks import TOKENS, Blocks, Given

Tensor = torch.Tensor
HEADS, COLUMNS = 1, 3


@dataclass(frozen=True)
class Sizes:
    """The sizes `[B H T S]` of a call, and the layouts of its masks."""

    shape: tuple[int, int, int, int]
    mask: Layout | None
    kept: Layout | None

    def beside(self, dim: int | None) -> tuple[Placement, Placement]:
        """Return the placements of mask and dropout mask if dimension `dim` of the scores is sharded."""
        if dim is None:
            return R, R
        alike = self.mask is not None and self.mask.shape[dim] == self.shape[dim]
        return Shard(dim) if alike else R, Shard(dim)


def _rows(sizes: Sizes) -> Iterator[tuple[Row, Row]]:
    """Yield rows for forward and backward.

    Forward: (query, key, value, mask, kept) -> (out, total). Backward: (gradient, query, key, value, out, total, mask,
    kept) -> gradients of (query, key, value).
    """
    tokens = Shard(TOKENS)

    def both(name: str, query: Placement, key: Placement, dim: int | None, *made: Placement) -> tuple[Row, Row]:
        """`made` are the placements of the gradients of query and keys, if these differ from theirs."""
        by_query, by_key = made or (query, key)
        beside = sizes.beside(dim)
        forward = Row(name, (query, key, key, *beside), (query, query))
        backward = (query, query, key, key, query, query, *beside)
        return forward, Row(name, backward, (by_query, by_key, by_key))

    yield both("replicated", R, R, None)
    yield both("batch", Shard(0), Shard(0), 0)
    yield both("heads", Shard(HEADS), Shard(HEADS), HEADS)
    yield both("queries", tokens, R, TOKENS, tokens, P)
    yield both("round", tokens, tokens, TOKENS)
    yield both("keys", R, tokens, COLUMNS, P, tokens)


def _choose(
    operator: _torch.Operator, named: Sequence[tuple[str, Layout | None]], key: Layout, sizes: Sizes, backward: bool
) -> Assignment:
    rows = [pair[backward] for pair in _rows(sizes)]
    mesh, (batch, heads, queries, _) = key.mesh, sizes.shape
    held = prod(key.shape) / prod(len(key.shards(dim)) for dim in (0, HEADS))
    query = dict(named)["query"]
    assert query is not None
    both = enumerate(zip(query.placements, key.placements, strict=True))
    tokens = Shard(TOKENS)
    stay = [p == q == tokens and not query.mostly_empty(mesh_dim) for mesh_dim, (p, q) in both]
    own = prod(key.shape) / prod(len(key.shards(dim)) for dim in range(key.ndim))
    rounds = 2 * held * key.dtype.itemsize > attention.GATHERED_BYTES
    # If there are so few keys that most ranks have none, some rank holds a large part of them anyway.
    spread = [p == tokens and not key.mostly_empty(mesh_dim) for mesh_dim, p in enumerate(key.placements)]

    def price(row: Row, mesh_dim: int) -> float:
        """The costs besides redistribution: passing keys around, gathering them (which takes memory), merging results.

        In backward, gradients of keys are sent back in the same way.
        """
        ranks = mesh.size(mesh_dim)
        if row.name == "round":
            return 2 * own * (ranks - 1) * (2 if backward else 1) if rounds else inf
        if rounds and spread[mesh_dim] and row.inputs[2 if backward else 1] == R:
            return inf
        if row.name == "keys":
            return 2 * batch * heads * queries * key.shape[-1] * (ranks - 1) / ranks
        return 4 * own * (ranks - 1) * backward if row.name == "queries" else 0.0

    def fits(assignment: Assignment) -> bool:
        """Whether tokens stay sharded where queries and keys both are, and nothing leaves most ranks empty."""
        used = {row.name for row in assignment}
        if any(row.name in ("batch", "heads", "keys") and stay[mesh_dim] for mesh_dim, row in enumerate(assignment)):
            return False
        if any(
            one is not None and leaves_ranks_empty(one, input_placements(assignment, n))
            for n, (_, one) in enumerate(named)
        ):
            return False
        shared = prod(mesh.size(m) for m, row in enumerate(assignment) if row.name == "heads")
        aligned = heads == key.shape[HEADS] or key.shape[HEADS] % shared == 0
        return aligned and not {"keys", "round"} <= used

    return choose(_torch.name_of(operator), rows, named, (), fits, price)


def _sizes(query: Layout, key: Layout, value: Layout, mask: Layout | None, kept: Layout | None) -> Sizes:
    fits = query.ndim == key.ndim == 4 and key.shape == value.shape and query.shape[0] == key.shape[0]
    fits = fits and query.shape[3] == key.shape[3] and query.shape[1] % max(1, key.shape[1]) == 0
    fits = fits and query.dtype == key.dtype == value.dtype
    batch, heads, tokens = query.shape[:3]
    shape = batch, heads, tokens, key.shape[2]
    if fits and mask is not None:
        fits = mask.ndim == 4 and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if not fits:
        raise Unfit("queries, keys, values and mask do not fit each other",
                    "give query (B, H, T, d), key and value (B, H, S, d), of one dtype, mask (B, H, T, S)")  # fmt: skip
    return Sizes(shape, mask, kept)


def _blocks(query: Layout, key: Layout, columns: Layout, assignment: Assignment, causal: bool) -> Blocks | None:
    """Return this rank's part; None outside of the mesh."""
    if not query.present:
        return None
    here = dict(enumerate(query.mesh.get_coordinate() or ()))
    own = key.own(TOKENS)
    round_over = tuple(m for m, row in enumerate(assignment) if row.name == "round" and query.mesh.size(m) > 1)
    line = rank_line(query.mesh, round_over) if round_over else None
    queries = []
    for number in range(1 if line is None else line.size):
        at, rest = dict(here), number
        for mesh_dim in reversed(round_over):
            rest, at[mesh_dim] = divmod(rest, query.mesh.size(mesh_dim))
        queries.append(query.part_at(TOKENS, at))
    return Blocks(tuple(queries), key.shards(TOKENS), own, columns.own(COLUMNS), causal, line)


def _columns(key: Layout, query: Layout, sizes: Sizes, assignment: Assignment) -> Layout:
    """Return the layout of the scores `[B H T S]`."""
    at = (Shard(COLUMNS) if row.name == "keys" else R for row in assignment)
    return query.new(sizes.shape, at)


def _as_given(like: Layout, placements: Sequence[Placement]) -> Moved:
    """Return how a gradient is redistributed to the placements of its tensor."""
    computed = like.new(like.shape, placements)
    pairs = zip(like.placements, placements, strict=True)
    return Moved(computed, computed.placed(given if isinstance(given, Shard) else at for given, at in pairs))


@plan_rule(forward_operator, behaviour=ATTENTION)
def forward(
    operator: _torch.Operator, query: Layout, key: Layout, value: Layout, mask: Layout | None, kept: Layout | None,
    dropout: float, causal: bool, scale: float,
) -> Call:  # fmt: skip
    sizes = _sizes(query, key, value, mask, kept)
    named = [("query", query), ("key", key), ("value", value), ("mask", mask), ("kept", kept)]
    chosen = _choose(operator, named, key, sizes, False)
    operands = [one and one.placed(input_placements(chosen, number)) for number, (_, one) in enumerate(named)]
    out = query.new(query.shape, (row.outputs[0] for row in chosen))
    total = query.new(query.shape[:3], out.placements, sums_in(query.dtype))
    assert operands[0] is not None
    assert operands[1] is not None
    blocks = _blocks(operands[0], operands[1], _columns(key, query, sizes, chosen), chosen, causal)
    together = [m for m, row in enumerate(chosen) if row.name == "keys" and query.mesh.size(m) > 1]

    def run(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kept: Tensor | None, *_: Any
    ) -> tuple[Tensor, Tensor]:
        assert blocks is not None
        made, weight = blocks.forward(q, k, v, Given(mask, kept, dropout), scale)
        if together:
            highest = all_reduce(weight, query.mesh, together, "max")
            highest = highest.masked_fill(highest == -inf, 0)
            share = (weight - highest).exp_().unsqueeze(-1)
            sums = all_reduce(torch.cat([made * share, share], -1), query.mesh, together)
            made, share = sums[..., :-1], sums[..., -1:]
            made, weight = (made / share.masked_fill(share == 0, 1)).to(q.dtype), highest + share.squeeze(-1).log()
        return made, weight.masked_fill(weight == -inf, 0)  # of which backward makes no weights, and no NaN

    return Call(operands, (out, total), run)


@plan_rule(backward_operator, behaviour=ATTENTION)
def backward(
    operator: _torch.Operator, gradient: Layout, query: Layout, key: Layout, value: Layout, out: Layout, total: Layout,
    mask: Layout | None, kept: Layout | None, dropout: float, causal: bool, scale: float,
) -> Call:  # fmt: skip
    sizes = _sizes(query, key, value, mask, kept)
    names = "gradient", "query", "key", "value", "out", "total", "mask", "kept"
    named = list(zip(names, (gradient, query, key, value, out, total, mask, kept), strict=True))
    chosen = _choose(operator, named, key, sizes, True)
    operands = [one and one.placed(input_placements(chosen, number)) for number, (_, one) in enumerate(named)]
    assert operands[1] is not None
    assert operands[2] is not None
    blocks = _blocks(operands[1], operands[2], _columns(key, query, sizes, chosen), chosen, causal)
    made = [_as_given(like, [row.outputs[number] for row in chosen]) for number, like in enumerate((query, key, value))]

    def run(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, mask: Tensor | None,
            kept: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert blocks is not None
        return blocks.backward(g, q, k, v, out, total, Given(mask, kept, dropout), scale)

    return Call(operands, made, run)
