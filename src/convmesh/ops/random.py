"""Random operators: the numbers of one device, however the tensor is sharded.

Which of its numbers a generator takes for an element is not known in general: on a CPU that differs between operators,
and on a GPU the order of elements depends on the size of the tensor. So every rank draws all of the tensor from its
generator, which has the same state on all ranks, and keeps its own part. This costs the time of one device. It also
costs memory for the whole tensor, for a moment, so a tensor of more than `LARGEST_WHOLE` elements is drawn in tiles
instead, each from a generator of its own: then the numbers are not those of one device, but still do not depend on the
sharding, and a rank draws only tiles that it needs.

It is known of the zeros and ones that a CPU draws for dropout (`bernoulli.py`): ranks share these, at any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from .. import _torch
from ..geometry import Box, Interval, shards
from ..sharding.cache import planned
from ..sharding.dispatch import check_placed, move
from ..sharding.layout import Layout
from ..sharding.pending import can_relocate, reduce_once
from ..sharding.registry import Behaviour, made_of_others, rule
from .bernoulli import zeros_and_ones

aten = torch.ops.aten

LARGEST_WHOLE = 1 << 26
TILES = 8  # along each dimension that has at least `SMALLEST_CUT` indices
SMALLEST_CUT = 64

made_of_others(
    *(
        getattr(aten, name).default
        for stem in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
        for name in (stem, f"{stem}_")
    )
)

STAYS = "all; the numbers are those of one device, if all ranks have the same seed"
TILES_BEYOND = (
    "every rank draws all numbers and keeps its own; over 2^26 elements it draws tiles, and the numbers are no longer "
    "those of one device, yet the same for every sharding"
)
DRAWN = Behaviour("random", STAYS, f"nothing: {TILES_BEYOND}")
SHARED = Behaviour(
    "random", STAYS,
    "with one probability for millions of elements on a CPU: which of them are ones, a byte each, where a rank's own are "
    "not a few ranges of memory; every rank draws a share of the numbers, and at any size they are those of one device. "
    f"Otherwise nothing: {TILES_BEYOND}",
)  # fmt: skip

Draw = Callable[[torch.Tensor, torch.Generator | None], Any]

IN_PLACE = (
    aten.uniform_.default, aten.normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.cauchy_.default, aten.log_normal_.default, aten.random_.default,
    getattr(aten.random_, "from"), aten.random_.to,
)  # fmt: skip
LIKE = (
    aten.rand_like.default, aten.rand_like.generator, aten.randn_like.default, aten.randn_like.generator,
    aten.randint_like.default, aten.randint_like.generator, aten.randint_like.low_dtype,
    aten.randint_like.low_generator_dtype,
)  # fmt: skip


@rule(*IN_PLACE, behaviour=DRAWN)
def fill(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, *rest = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, (("self", tensor),))
    numbers, generator = rest[:-1], rest[-1]
    layout = _layout(_torch.spec_of(tensor), None)
    drawn = _draw(layout, tensor, generator, lambda empty, source: _torch.call(operator, [empty, *numbers, source]))
    return _write(tensor, drawn)


@rule(*LIKE, behaviour=DRAWN)
def like(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    known = _torch.signature(operator).names
    values = dict(zip(known, _torch.arguments(operator, args, kwargs), strict=True))
    tensor = values["self"]
    check_placed(operator._schema.name, (("self", tensor),))
    layout = _layout(_torch.spec_of(tensor), values["dtype"])

    def draw(empty: torch.Tensor, source: torch.Generator | None) -> torch.Tensor:
        if "high" in values:
            return empty.random_(values.get("low", 0), values["high"], generator=source)
        uniform = operator._schema.name == "aten::rand_like"
        return empty.uniform_(generator=source) if uniform else empty.normal_(generator=source)

    return _torch.wrap(_draw(layout, tensor, values.get("generator"), draw), layout.spec)


@rule(aten.bernoulli_.float, behaviour=SHARED)
def bernoulli_in_place(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, p, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, (("self", tensor),))
    layout = _layout(_torch.spec_of(tensor), None)
    into = _torch.local_of(tensor) if tensor.placements == layout.placements else None
    return _write(tensor, _zeros_and_ones(layout, tensor, p, generator, into))


@rule(aten.bernoulli.p, behaviour=SHARED)
def bernoulli_like(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, p, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, (("self", tensor),))
    layout = _layout(_torch.spec_of(tensor), None)
    return _torch.wrap(_zeros_and_ones(layout, tensor, p, generator), layout.spec)


@rule(aten.bernoulli.default, aten.bernoulli_.Tensor, behaviour=SHARED)
def bernoulli(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each element with a probability of its own, which a uniform number is compared with, as one CPU does it."""
    *tensors, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, tuple(zip(("self", "p"), tensors, strict=False)))
    given, probability = tensors[0], tensors[-1]
    layout = _layout(_torch.spec_of(given), None)
    chance = _beside(probability, layout)
    wide = layout.typed(torch.float64 if chance.dtype == torch.float64 else torch.float32)
    uniform = _draw(wide, given, generator, lambda empty, source: empty.uniform_(generator=source))
    drawn = (uniform < chance).to(layout.dtype)
    return _write(given, drawn) if given is not probability else _torch.wrap(drawn, layout.spec)


@rule(aten.native_dropout.default, behaviour=DRAWN)
def native_dropout(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Linear in its input, so a pending sum may stay one: its terms are all multiplied by the same numbers."""
    input, p, train = _torch.arguments(operator, args, kwargs)
    check_placed("native_dropout", (("input", input),))
    layout, local = _layout(_torch.spec_of(input), None), _torch.local_of(input)

    def draw(empty: torch.Tensor, source: torch.Generator | None) -> Any:
        if source is None:  # ones become 0 or 1 / (1 - p), drawn exactly as the operator does it on this device
            return operator(empty.fill_(1), p, True)[0]
        return empty.bernoulli_(1 - p, generator=source).div_(1 - p)

    if train is False or p == 0:
        noise = torch.ones_like(local)
    else:
        noise = _draw(layout, input, None, draw) if p < 1 else torch.zeros_like(local)
    mask = _torch.wrap(noise != 0, layout.typed(torch.bool).spec)
    return _torch.wrap(local * noise, _torch.spec_of(input)), mask


@rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, behaviour=DRAWN)
def normal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Standard numbers in the shape of both, stretched and shifted, which is how one device does it."""
    mean, std, generator = _torch.arguments(operator, args, kwargs)
    named = [(name, t) for name, t in (("mean", mean), ("std", std)) if isinstance(t, torch.Tensor)]
    check_placed("normal", named)
    model = named[0][1] if len(named) == 1 else aten.add.Tensor(mean, std)
    drawn = fill(aten.normal_.default, (aten.empty_like.default(model), 0.0, 1.0), {"generator": generator})
    scaled = aten.mul.Tensor(drawn, std)
    return aten.add.Tensor(scaled, mean) if isinstance(mean, torch.Tensor) else aten.add.Scalar(scaled, mean)


RRELU = Behaviour(
    "random", "all; numbers that do not depend on the sharding, but are not those of one device", "nothing"
)


@rule(aten.rrelu_with_noise.default, behaviour=RRELU)
def rrelu_with_noise(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """One CPU draws a number for each negative element it meets: how many that are before a shard, no rank knows."""
    input, noise, lower, upper, training, generator = _torch.arguments(operator, args, kwargs)
    check_placed("rrelu_with_noise", (("self", input), ("noise", noise)))
    layout = _layout(_torch.spec_of(input), None)
    x = _beside(input, layout)
    if not training:
        return _torch.wrap(torch.nn.functional.leaky_relu(x, (lower + upper) / 2), layout.spec)
    slope = _draw(layout, input, generator, lambda empty, source: empty.uniform_(lower, upper, generator=source))
    slope = torch.where(x <= 0, slope, 1)
    _write(noise, _torch.redistribute(slope, layout.spec, _layout(_torch.spec_of(noise), None).spec))
    return _torch.wrap(x * slope, layout.spec)


@planned
def _layout(spec: _torch.Spec, dtype: torch.dtype | None) -> Layout:
    """Where numbers for a tensor are drawn: a pending sum is no place for them."""
    layout = Layout.of(spec)
    placements: tuple[Placement, ...] = tuple(
        Replicate() if isinstance(placement, Partial) else placement for placement in layout.placements
    )
    return layout.placed(placements).typed(dtype or layout.dtype)


def _beside(tensor: DTensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor that is used elementwise with one that lies as `layout` says."""
    tensor = reduce_once([tensor]).get(id(tensor), tensor)
    own = Layout.of(_torch.spec_of(tensor))
    if layout.mesh.get_coordinate() is None:
        return _torch.local_of(tensor)
    target = own.placed(layout.placements if own.shape == layout.shape else (Replicate(),) * own.mesh.ndim)
    local: torch.Tensor = move(tensor, target)
    if own.shape == layout.shape:
        return local
    whole = local.expand(layout.shape)
    return _cut(whole, tuple(layout.own(dim) for dim in range(whole.dim())))


def _write(tensor: DTensor, drawn: torch.Tensor) -> DTensor:
    """In place. A pending sum becomes a tensor that is none; where that cannot be, one rank has all of it."""
    spec, layout, local = _torch.spec_of(tensor), _layout(_torch.spec_of(tensor), None), _torch.local_of(tensor)
    if spec.placements != layout.placements and can_relocate(tensor):
        _torch.relocate(tensor, drawn, layout.spec)
    elif spec.mesh.get_coordinate() is not None and _torch.memory_of(drawn) != _torch.memory_of(local):
        local.copy_(_torch.redistribute(drawn, layout.spec, spec))
    return tensor


def _draw(layout: Layout, model: DTensor, generator: torch.Generator | None, draw: Draw) -> torch.Tensor:
    """This rank's part of what `draw` fills an empty tensor with."""
    local = _torch.local_of(model)
    if layout.mesh.get_coordinate() is None:
        return local.new_empty(0, dtype=layout.dtype)
    own = tuple(layout.own(dim) for dim in range(len(layout.shape)))
    if prod(layout.shape) > LARGEST_WHOLE and not _torch.tracing():
        return _draw_tiles(layout, own, local.device, generator, draw)
    whole = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=local.device)
    drawn: torch.Tensor = draw(whole, generator)
    return _cut(drawn, own).clone() if layout.cuts else drawn  # a copy, so that the whole goes


def _zeros_and_ones(
    layout: Layout, model: DTensor, p: float, generator: torch.Generator | None, into: torch.Tensor | None = None
) -> torch.Tensor:
    if layout.mesh.get_coordinate() is not None:
        drawn = zeros_and_ones(layout, _torch.local_of(model).device, into, p, generator)
        if drawn is not None:
            return drawn
    return _draw(layout, model, generator, lambda empty, source: empty.bernoulli_(p, generator=source))


def _draw_tiles(
    layout: Layout, own: Box, device: torch.device, generator: torch.Generator | None, draw: Draw
) -> torch.Tensor:
    # One number of the generator, which all ranks draw alike, is the seed of all tiles.
    seed = int(torch.empty((), dtype=torch.int64, device=device).random_(generator=generator))
    result = torch.empty(layout.local_shape, dtype=layout.dtype, device=device)
    for number, tile in enumerate(_tiles(layout.shape)):
        common = tuple(a & b for a, b in zip(tile, own, strict=True))
        if not all(common):
            continue
        source = torch.Generator(device).manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**63)
        empty = torch.empty([len(side) for side in tile], dtype=layout.dtype, device=device)
        part = _cut(draw(empty, source), _inside(common, tile))
        _cut(result, _inside(common, own)).copy_(part)
    return result


def _tiles(shape: tuple[int, ...]) -> Iterator[Box]:
    return product(*(shards(size, (TILES,)) if size >= SMALLEST_CUT else (Interval(0, size),) for size in shape))


def _inside(box: Box, frame: Box) -> Box:
    return tuple(side.shift(-outer.start) for side, outer in zip(box, frame, strict=True))


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, side in enumerate(box):
        if len(side) != tensor.shape[dim]:
            tensor = tensor.narrow(dim, side.start, len(side))
    return tensor
