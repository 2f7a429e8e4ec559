"""Random operators."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate

from ... import _torch
from ...sharding.assign import assign
from ...sharding.layout import Layout
from ...sharding.partial import reduce_once
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from ...sharding.result_strides import strides_of
from .bernoulli import zeros_and_ones
from .replicated_draw import DRAWN, SHARED, cut_out, draw_own, where_drawn

aten = torch.ops.aten

made_of_others(
    *(
        getattr(aten, name).default
        for stem in ("feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
        for name in (stem, f"{stem}_")
    )
)

IN_PLACE = (
    aten.uniform_.default, aten.normal_.default, aten.log_normal_.default, aten.exponential_.default,
    aten.geometric_.default, aten.cauchy_.default, aten.random_.default, aten.random_.to,
    getattr(aten.random_, "from"),
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
    layout = where_drawn(_torch.spec_of(tensor), None)
    drawn = draw_own(layout, tensor, generator, lambda empty, source: _torch.call(operator, [empty, *numbers, source]))
    return _write(tensor, drawn)


@rule(*LIKE, behaviour=DRAWN)
def like(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    known = _torch.signature(operator).names
    values = dict(zip(known, _torch.arguments(operator, args, kwargs), strict=True))
    tensor = values["self"]
    check_placed(operator._schema.name, (("self", tensor),))
    layout = where_drawn(_torch.spec_of(tensor), values["dtype"], *strides_of(operator, args, kwargs))

    def draw(empty: torch.Tensor, source: torch.Generator | None) -> torch.Tensor:
        if "high" in values:
            return empty.random_(values.get("low", 0), values["high"], generator=source)
        uniform = operator._schema.name == "aten::rand_like"
        return empty.uniform_(generator=source) if uniform else empty.normal_(generator=source)

    return _torch.wrap(draw_own(layout, tensor, values.get("generator"), draw), layout.spec)


@rule(aten.bernoulli_.float, behaviour=SHARED)
def bernoulli_in_place(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, p, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, (("self", tensor),))
    layout = where_drawn(_torch.spec_of(tensor), None)
    into = _torch.local_of(tensor) if tensor.placements == layout.placements else None
    return _write(tensor, _zeros_and_ones(layout, tensor, p, generator, into))


@rule(aten.bernoulli.p, behaviour=SHARED)
def bernoulli_like(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    tensor, p, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, (("self", tensor),))
    layout = where_drawn(_torch.spec_of(tensor), None, *strides_of(operator, args, kwargs))
    return _torch.wrap(_zeros_and_ones(layout, tensor, p, generator), layout.spec)


@rule(aten.bernoulli.default, aten.bernoulli_.Tensor, behaviour=SHARED)
def bernoulli(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each element with a probability of its own, which a uniform number is compared with, as one CPU does it."""
    *tensors, generator = _torch.arguments(operator, args, kwargs)
    check_placed(operator._schema.name, tuple(zip(("self", "p"), tensors, strict=False)))
    given, probability = tensors[0], tensors[-1]
    layout = where_drawn(_torch.spec_of(given), None, *strides_of(operator, args, kwargs))
    chance = _beside(probability, layout)
    wide = layout.typed(torch.float64 if chance.dtype == torch.float64 else torch.float32)
    uniform = draw_own(wide, given, generator, lambda empty, source: empty.uniform_(generator=source))
    drawn = (uniform < chance).to(layout.dtype)
    return _write(given, drawn) if given is not probability else _torch.wrap(drawn, layout.spec)


@rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, behaviour=DRAWN)
def normal(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Standard numbers in the shape of both, stretched and shifted, which is how one device does it."""
    mean, std, generator = _torch.arguments(operator, args, kwargs)
    named = [(name, t) for name, t in (("mean", mean), ("std", std)) if isinstance(t, torch.Tensor)]
    check_placed("normal", named)
    model = named[0][1] if len(named) == 1 else aten.add.Tensor(mean, std)
    empty = aten.empty_like.default(model, memory_format=torch.contiguous_format)
    drawn = fill(aten.normal_.default, (empty, 0.0, 1.0), {"generator": generator})
    scaled = aten.mul.Tensor(drawn, std)
    return aten.add.Tensor(scaled, mean) if isinstance(mean, torch.Tensor) else aten.add.Scalar(scaled, mean)


RRELU = Behaviour("all; numbers that do not depend on the sharding, but are not those of one device", "nothing")


@rule(aten.rrelu_with_noise.default, behaviour=RRELU)
def rrelu_with_noise(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """One CPU draws a number for each negative element it meets: how many that are before a shard, no rank knows."""
    input, noise, lower, upper, training, generator = _torch.arguments(operator, args, kwargs)
    check_placed("rrelu_with_noise", (("self", input), ("noise", noise)))
    layout = where_drawn(_torch.spec_of(input), None)
    x = _beside(input, layout)
    if not training:
        return _torch.wrap(torch.nn.functional.leaky_relu(x, (lower + upper) / 2), layout.spec)
    slope = draw_own(layout, input, generator, lambda empty, source: empty.uniform_(lower, upper, generator=source))
    slope = torch.where(x <= 0, slope, 1)
    _write(noise, _torch.redistribute(slope, layout.spec, where_drawn(_torch.spec_of(noise), None).spec))
    return _torch.wrap(x * slope, layout.spec)


def _beside(tensor: DTensor, layout: Layout) -> torch.Tensor:
    """This rank's part of a tensor that is used elementwise with one that lies as `layout` says."""
    tensor = reduce_once([tensor]).get(id(tensor), tensor)
    own = Layout.of(_torch.spec_of(tensor))
    if not layout.present:
        return _torch.local_of(tensor)
    target = own.placed(layout.placements if own.shape == layout.shape else (Replicate(),) * own.mesh.ndim)
    local: torch.Tensor = move(tensor, target)
    if own.shape == layout.shape:
        return local
    whole = local.expand(layout.shape)
    return cut_out(whole, tuple(layout.own(dim) for dim in range(whole.dim())))


def _write(tensor: DTensor, drawn: torch.Tensor) -> DTensor:
    """In place."""
    if _torch.memory_of(drawn) != _torch.memory_of(_torch.local_of(tensor)):
        assign(tensor, _torch.wrap(drawn, where_drawn(_torch.spec_of(tensor), None).spec))
    return tensor


def _zeros_and_ones(
    layout: Layout, model: DTensor, p: float, generator: torch.Generator | None, into: torch.Tensor | None = None
) -> torch.Tensor:
    if layout.present:
        drawn = zeros_and_ones(layout, _torch.local_of(model).device, into, p, generator)
        if drawn is not None:
            return drawn
    return draw_own(layout, model, generator, lambda empty, source: empty.bernoulli_(p, generator=source))
