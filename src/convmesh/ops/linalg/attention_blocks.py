"""Attention in blocks: queries stay where they are, keys and values go round.

A rank's queries meet its own keys first, and then those of one rank after the other, in pieces. While they meet one
piece the next one is on its way. Each meeting gives a weighted mean of values and the sum of its weights, of which the
whole is put together. In backward, gradients of keys and values go back to their owners, piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

import torch

from ...comm import Held, Pending, RankLine, Schedule, start
from ...geometry import HaloPlan, Interval, Shards
from ...kernels.attention import attend, attend_backward, sums_in

Tensor = torch.Tensor
TOKENS = 2

# A shard of keys is sent in so many pieces, if each then has so many tokens: two of them are held at a time, beside
# what a rank owns. Its queries are taken in as many, for what they make with one piece of keys.
PIECES, SHORTEST = 16, 1024


def pieces(shard: Interval, largest: int) -> tuple[Interval, ...]:
    """Of a shard of at most so many tokens, as many as of any other."""
    count = max(1, min(PIECES, largest // SHORTEST))
    step = -(-shard.size // count)
    return tuple(Interval(shard.start + step * n, shard.start + step * (n + 1)) & shard for n in range(count))


def visible(queries: Interval, keys: Interval) -> Iterator[tuple[Interval, Interval, bool]]:
    """Of causal attention, in which query `i` sees the keys up to `i`: parts in which all is seen, and squares on the
    diagonal. No fused kernel takes anything else, and none needs a mask for these."""
    before = Interval(keys.start, min(keys.stop, queries.start))
    if queries and before:
        yield queries, before, False
    corner = max(queries.start, keys.start)
    square = Interval(corner, min(queries.stop, keys.stop))
    if square:
        yield square, square, True
        if queries.stop > square.stop:
            yield Interval(square.stop, queries.stop), square, False


@dataclass(frozen=True)
class Rotated:
    """Each rank of a line needs one piece of the shard of the rank that comes so many places after it."""

    keys: Shards
    queries: tuple[Interval, ...]  # of each rank
    causal: bool
    by: int
    piece: int

    def parts(self, rank: int) -> tuple[Interval, ...]:
        part = pieces(self.keys[(rank + self.by) % len(self.keys)], self.keys[0].size)[self.piece]
        seen = not self.causal or part.start < self.queries[rank].stop
        return (part,) if part and self.queries[rank] and seen else ()

    def touching(self, part: Interval) -> list[int]:
        return sorted((owner - self.by) % len(self.keys) for owner in self.keys.touching(part))


@dataclass(frozen=True)
class Step:
    """A piece of keys that a rank's queries meet, and how it gets there: its own is there without a schedule."""

    keys: Interval
    schedule: Schedule | None = None


@dataclass(frozen=True, eq=False)
class Blocks:
    """What a rank computes of attention: its queries, its own keys, the line along which keys go round, if they do, and
    the keys of which it has the mask."""

    queries: tuple[Interval, ...]  # of all ranks of the line
    keys: Shards
    own: Interval
    columns: Interval
    causal: bool
    line: RankLine | None

    @cached_property
    def own_queries(self) -> Interval:
        return self.queries[0 if self.line is None else self.line.rank]

    @cached_property
    def query_pieces(self) -> tuple[Interval, ...]:
        return (self.own_queries,) if self.line is None else pieces(self.own_queries, self.own_queries.size)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        if self.line is None:
            return (Step(self.own),)
        mine = pieces(self.own, self.keys[0].size)
        found = [Step(part) for part in mine]
        for by, piece in product(range(1, self.line.size), range(len(mine))):
            needed = Rotated(self.keys, self.queries, self.causal, by, piece)
            moves = HaloPlan(self.keys, needed).along(0, (Interval(0, self.keys.size),))
            arriving = needed.parts(self.line.rank) or (Interval(0, 0),)
            found.append(Step(arriving[0], Schedule(self.line, (moves, moves))))
        return tuple(found)

    @cached_property
    def is_one_meeting(self) -> bool:
        """Whether a kernel takes all of it at once."""
        return self.line is None and list(self.meetings(self.own)) == [(self.own_queries, self.own, self.causal)]

    def meetings(self, keys: Interval) -> Iterator[tuple[Interval, Interval, bool]]:
        """Of this rank's queries with these keys."""
        for queries in self.query_pieces:
            if self.causal:
                yield from visible(queries, keys)
            elif queries and keys:
                yield queries, keys, False

    def round(self, key: Tensor, value: Tensor) -> Iterator[tuple[Step, Tensor, Tensor]]:
        """All keys and values, piece by piece, the next one on its way."""
        mine = [Held.own(tensor, (TOKENS,), (self.own,)) for tensor in (key, value)]
        under_way: Pending | None = None
        for step, following in zip(self.steps, (*self.steps[1:], None), strict=True):
            more = [(), ()] if under_way is None else under_way.finish()
            under_way = None
            if following is not None and following.schedule is not None:
                under_way = start(following.schedule, mine)
            k, v = (one.plus(blocks).read((step.keys,)) for one, blocks in zip(mine, more, strict=True))
            yield step, k, v

    def forward(self, query: Tensor, key: Tensor, value: Tensor, given: Given, scale: float) -> tuple[Tensor, Tensor]:
        """The result, and the logarithms of the sums of all weights, -inf where a query sees nothing."""
        wide = sums_in(query.dtype)
        if self.is_one_meeting:
            at = self.own_queries, self.own
            beside = given.bias(self, *at, query), given.kept_of(self, *at, wide)
            return attend(query, key, value, *beside, self.causal, scale)
        out = token_by_token(query, wide)
        total = query.new_full(query.shape[:3], -inf, dtype=wide)
        for step, k, v in self.round(key, value):
            for queries, keys, causal in self.meetings(step.keys):
                seen = _part(k, keys, step.keys), _part(v, keys, step.keys)
                q, at = _part(query, queries, self.own_queries), (queries, keys)
                made = attend(q, *seen, given.bias(self, *at, query), given.kept_of(self, *at, wide), causal, scale)
                _merge(_part(out, queries, self.own_queries), _part(total, queries, self.own_queries), *made)
        return out.to(query.dtype), total

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor, given: Given,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        wide = sums_in(query.dtype)
        if self.is_one_meeting:
            at = self.own_queries, self.own
            beside = given.bias(self, *at, query), given.kept_of(self, *at, wide)
            return attend_backward(gradient, query, key, value, out, total, *beside, self.causal, scale)
        by_query, by_key, by_value = (token_by_token(one, wide) for one in (query, key, value))
        sums = [Held.own(one, (TOKENS,), (self.own,)) for one in (by_key, by_value)]
        going_back: Pending | None = None
        for step, k, v in self.round(key, value):
            if step.schedule is None:
                into = [one.read((step.keys,)) for one in sums]
            else:
                into = [torch.zeros_like(one, dtype=wide) for one in (k, v)]
            for queries, keys, causal in self.meetings(step.keys):
                g, q, o, t = (_part(one, queries, self.own_queries) for one in (gradient, query, out, total))
                seen, at = (_part(k, keys, step.keys), _part(v, keys, step.keys)), (queries, keys)
                beside = given.bias(self, *at, query), given.kept_of(self, *at, wide)
                made = attend_backward(g, q, *seen, o, t, *beside, causal, scale)
                _part(by_query, queries, self.own_queries).add_(made[0])
                for one, more in zip(into, made[1:], strict=True):
                    _part(one, keys, step.keys).add_(more)
            if going_back is not None:
                going_back.finish(accumulate=sums)
                going_back = None
            if step.schedule is not None:
                sent = [Held.own(one, (TOKENS,), (step.keys,)) for one in into]
                going_back = start(step.schedule.transposed(), sent)
        if going_back is not None:
            going_back.finish(accumulate=sums)
        return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)


@dataclass(frozen=True)
class Given:
    """A rank's part of a mask, [b h t s] each of which may be 1, and of what dropout keeps, [B H T S]."""

    mask: Tensor | None
    kept: Tensor | None
    dropout: float

    def bias(self, blocks: Blocks, queries: Interval, keys: Interval, like: Tensor) -> Tensor | None:
        if self.mask is None:
            return None
        mask = self.mask
        if mask.shape[2] > 1:
            mask = mask.narrow(2, queries.start - blocks.own_queries.start, queries.size)
        if mask.shape[3] > 1:
            mask = mask.narrow(3, keys.start - blocks.columns.start, keys.size)
        if mask.dtype == torch.bool:
            mask = mask.new_zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, -inf)
        return mask.expand(*mask.shape[:3], keys.size)

    def kept_of(self, blocks: Blocks, queries: Interval, keys: Interval, dtype: torch.dtype) -> Tensor | None:
        if self.kept is None:
            return None
        part = _part(self.kept, queries, blocks.own_queries).narrow(3, keys.start - blocks.columns.start, keys.size)
        return part.to(dtype) * (0 if self.dropout == 1 else 1 / (1 - self.dropout))


def token_by_token(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros, which lie in memory as what torch's fused kernels make: [B T H d], seen as [B H T d]."""
    batch, heads, tokens, width = like.shape
    return like.new_zeros((batch, tokens, heads, width), dtype=dtype).transpose(1, 2)


def _part(tensor: Tensor, tokens: Interval, held: Interval) -> Tensor:
    return tensor if tokens == held else tensor.narrow(TOKENS, tokens.start - held.start, tokens.size)


def _merge(out: Tensor, total: Tensor, more: Tensor, weight: Tensor) -> None:
    """Weighted means and the logarithms of their weights, in place; -inf is no weight at all."""
    both = torch.logaddexp(total, weight)
    share = (weight - both.masked_fill(both == -inf, 0)).exp_()
    out.lerp_(more, share.unsqueeze(-1))
    total.copy_(both)
