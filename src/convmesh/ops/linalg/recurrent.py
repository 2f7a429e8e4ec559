"""Recurrent layers, whose steps are sequential: the batch is sharded while they run.

torch decomposes them into linear layers and elementwise functions, step by step and in place: the placements of the
initial state decide those of all that follow. Where time or features are sharded, an all-to-all shards the batch before
the first step, and another one restores the placements after the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...sharding.buffers import Buffer
from ...sharding.registry import Behaviour, composite

RECURRENT = Behaviour(
    "batch, time, features",
    "nothing if the batch is sharded; an all-to-all from time or features to the batch before the first step, and one "
    "back after the last; with a single sample, communication in every step",
)


def _layer(name: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Declare the rule of one kind of recurrent layer."""
    operator = getattr(torch.ops.aten, name).input

    @composite(f"{name}.input", RECURRENT)
    def layer(
        input: torch.Tensor, state: torch.Tensor | Sequence[torch.Tensor], *rest: Any
    ) -> tuple[torch.Tensor, ...]:
        """`[T B I]` or, batch first, `[B T I]`, and states `[L B H]` -> `[T B O]`, states."""
        batch_first = rest[-1]
        if not isinstance(input, DTensor) or isinstance(input, Buffer) or input.dim() != 3:
            return _decomposed(operator, input, state, rest)
        batch, before = (0 if batch_first else 1), input.placements
        placements = _shard_batch(before, batch, input.shape[batch])
        if placements != before:
            input = input.redistribute(placements=placements)
        at = tuple(Shard(1) if isinstance(p, Shard) and p.dim == batch else Replicate() for p in placements)
        states = [_place_state(one, at) for one in ([state] if isinstance(state, torch.Tensor) else state)]
        output, *last = _decomposed(operator, input, states[0] if isinstance(state, torch.Tensor) else states, rest)
        if isinstance(output, DTensor) and placements != before:
            back = [p if isinstance(p, Shard) else q for p, q in zip(before, output.placements, strict=True)]
            output = output.redistribute(placements=back)
        return (output, *last)

    return layer


def _decomposed(operator: Any, input: torch.Tensor, state: Any, rest: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Run the layer as torch decomposes it."""
    results: tuple[torch.Tensor, ...] = _torch.composite(operator, (input, state, *rest), {})
    return results


def _shard_batch(placements: Sequence[Placement], batch: int, samples: int) -> tuple[Placement, ...]:
    """Return placements that shard the batch instead of time or features; unchanged if there is only one sample."""
    return tuple(Shard(batch) if isinstance(p, Shard) and samples > 1 else p for p in placements)


def _place_state(state: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
    """Give a state these placements."""
    if isinstance(state, Buffer) and state.is_buffer():
        state.place_at(placements, state.content.mesh)
        return state
    return state.redistribute(placements=placements) if isinstance(state, DTensor) else state


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _layer(_name)
