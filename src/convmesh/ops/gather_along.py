"""`gather`: every output takes one number along a dimension, where an index says.

torch makes the gradient of max unpooling of it, and the double gradient of max pooling. An index may point anywhere
along its dimension, so that dimension is whole wherever another one can be cut in its stead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard

from .. import _torch
from ..sharding.cache import planned
from ..sharding.dispatch import check_placed, move
from ..sharding.errors import refuse
from ..sharding.layout import Layout, dense_stride
from ..sharding.registry import Behaviour, rule
from ..sharding.rows import Row, choose, input_placements, output_placements

aten = torch.ops.aten
R = Replicate()


@rule(
    aten.gather.default,
    behaviour=Behaviour(
        "indexing",
        "all dimensions but the indexed one; that one of the indices, too, if the input is replicated",
        "all-to-all where the indexed dimension is cut: another dimension is cut in its stead, and the input is made "
        "whole only if no other dimension has as many indices as there are ranks",
    ),
)
def gather(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    input, dim, index, _ = _torch.arguments(operator, args, kwargs)
    check_placed("gather", (("input", input), ("index", index)))
    source, at, output = _plan(_torch.spec_of(input), _torch.spec_of(index), dim)
    x, places = move(input, source), move(index, at)
    if source.mesh.get_coordinate() is None:
        return _torch.wrap(x.new_empty(0), output.spec)
    return _torch.wrap(aten.gather.default(x, dim, places).contiguous(), output.spec)


@planned
def _plan(input_spec: _torch.Spec, index_spec: _torch.Spec, dim: int) -> tuple[Layout, Layout, Layout]:
    input, index = Layout.of(input_spec), Layout.of(index_spec)
    named = (("input", input), ("index", index))
    rank = len(input.shape)
    if rank != len(index.shape) or not -max(1, rank) <= dim < max(1, rank):
        raise refuse("gather", f"dimension {dim} of tensors of {rank} and {len(index.shape)} dimensions", named,
                     "give an index with the input's number of dimensions")  # fmt: skip
    dim %= max(1, rank)
    # A dimension of which only the first indices are read is not cut alike in both.
    alike = [d for d in range(rank) if d != dim and input.shape[d] == index.shape[d]]
    rows = [Row("replicated", (R, R), (R,)), *(Row("sharded", (Shard(d), Shard(d)), (Shard(d),)) for d in alike)]
    if rank:
        rows.append(Row("sharded indices", (R, Shard(dim)), (Shard(dim),)))

    def fits(assignment: tuple[Row, ...]) -> bool:
        """Nothing is moved to a dimension on which some ranks would have nothing to do."""
        layout = index.placed(output_placements(assignment, 0))
        new = (d for d, cut in layout.cuts.items() if cut not in (index.cuts.get(d), input.cuts.get(d)))
        return all(min(map(len, layout.shards(d))) > 0 for d in new)

    chosen = choose("gather", rows, named, fits=fits)
    stride = dense_stride(index.shape, torch.contiguous_format)
    output = Layout(input.mesh, output_placements(chosen, 0), index.shape, stride, input.dtype)
    return input.placed(input_placements(chosen, 0)), index.placed(input_placements(chosen, 1)), output
