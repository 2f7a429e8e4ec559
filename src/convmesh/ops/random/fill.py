"""Rules of random operators: in place, `*_like`, Bernoulli, normal, RReLU."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ... import _torch
from ...sharding.assign import assign
from ...sharding.call import Call
from ...sharding.layout import Layout
from ...sharding.plan_rule import Made, plan_rule
from ...sharding.redistribute import check_placed, move
from ...sharding.registry import Behaviour, made_of_others, rule
from ...strides import Stride
from .bernoulli import bernoulli_shard
from .replicated_draw import DRAWN, SHARED, draw_shard, drawing_layout, narrowed

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


NUMBERS = ("generator", "from", "to", "low", "high", "mean", "std", "median", "sigma", "lambd")
Strides = tuple[Stride | None, ...]


@plan_rule(*IN_PLACE, behaviour=DRAWN, varies=(*NUMBERS, "p"))
def fill(operator: _torch.Operator, tensor: Layout, *_: Any) -> Call:
    layout = drawing_layout(tensor)

    def run(local: torch.Tensor, *rest: Any) -> torch.Tensor:
        *numbers, generator = rest
        return draw_shard(
            layout, local.device, generator, lambda e, source: _torch.call(operator, [e, *numbers, source])
        )

    return Call((tensor,), layout, run, writes=True)


@plan_rule(*LIKE, behaviour=DRAWN, varies=NUMBERS, strided=True)
def like(operator: _torch.Operator, tensor: Layout, *rest: Any) -> Call:
    names = _torch.signature(operator).names
    layout = drawing_layout(tensor, rest[names.index("dtype") - 1], *rest[-1])
    uniform = operator._schema.name == "aten::rand_like"

    def run(local: torch.Tensor, *rest: Any) -> torch.Tensor:
        given = dict(zip(names[1:], rest, strict=True))

        def draw(empty: torch.Tensor, source: torch.Generator | None) -> torch.Tensor:
            if "high" in given:
                return empty.random_(given.get("low", 0), given["high"], generator=source)
            return empty.uniform_(generator=source) if uniform else empty.normal_(generator=source)

        return draw_shard(layout, local.device, given.get("generator"), draw)

    return Call((tensor,), layout, run)


@plan_rule(aten.bernoulli_.float, behaviour=SHARED, varies=("generator",))
def bernoulli_in_place(operator: _torch.Operator, tensor: Layout, p: float, _: Any) -> Call:
    layout = drawing_layout(tensor)
    same = layout.placements == tensor.placements

    def run(local: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
        return _draw_bernoulli(layout, local.device, p, generator, local if same else None)

    return Call((tensor,), layout, run, writes=True)


@plan_rule(aten.bernoulli.p, behaviour=SHARED, varies=("generator",), strided=True)
def bernoulli_like(operator: _torch.Operator, tensor: Layout, p: float, _: Any, strides: Strides) -> Call:
    layout = drawing_layout(tensor, None, *strides)
    return Call((tensor,), layout, lambda local, *how: _draw_bernoulli(layout, local.device, *how))


@plan_rule(aten.bernoulli.default, aten.bernoulli_.Tensor, behaviour=SHARED, varies=("generator",), strided=True)
def bernoulli(operator: _torch.Operator, tensor: Layout, *rest: Any) -> Call:
    """One probability per element, compared with a uniform number, as one CPU does it."""
    *probabilities, _, strides = rest
    layout, writes = drawing_layout(tensor, None, *strides), bool(probabilities)
    probability = probabilities[0] if writes else tensor
    uniform_layout = layout.typed(torch.float64 if probability.dtype == torch.float64 else torch.float32)

    def run(*values: Any) -> torch.Tensor:
        *tensors, generator = values
        p = _broadcast(tensors[-1], probability, layout)
        uniform = draw_shard(
            uniform_layout, p.device, generator, lambda empty, source: empty.uniform_(generator=source)
        )
        return (uniform < p).to(layout.dtype)

    return Call((*((tensor,) if writes else ()), _operand_layout(probability, layout)), layout, run, writes=writes)


def _operand_layout(operand: Layout, layout: Layout) -> Layout:
    """The layout of an operand that is used elementwise: the tensor's placements, or replicated if it is broadcast."""
    return operand.placed(layout.placements) if operand.shape == layout.shape else operand.replicated()


def _broadcast(local: torch.Tensor, operand: Layout, layout: Layout) -> torch.Tensor:
    """Return the operand's values for this rank's shard."""
    if operand.shape == layout.shape:
        return local
    return narrowed(local.expand(layout.shape), tuple(layout.own(dim) for dim in range(layout.ndim)))


@plan_rule(
    aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, behaviour=DRAWN,
    varies=("generator",),
)  # fmt: skip
def normal(operator: _torch.Operator, *_: Any) -> Made:
    return _normal


def _normal(mean: Any, std: Any, generator: torch.Generator | None) -> Any:
    """Draw standard normal numbers in the broadcast shape, then scale and shift them, as one device does."""
    tensors = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    model = tensors[0] if len(tensors) == 1 else aten.add.Tensor(mean, std)
    empty = aten.empty_like.default(model, memory_format=torch.contiguous_format)
    scaled = aten.mul.Tensor(aten.normal_.default(empty, 0.0, 1.0, generator=generator), std)
    return aten.add.Tensor(scaled, mean) if isinstance(mean, torch.Tensor) else aten.add.Scalar(scaled, mean)


RRELU = Behaviour(
    "all dimensions; the numbers do not depend on the sharding, but are not those of one device", "nothing"
)


@rule(aten.rrelu_with_noise.default, behaviour=RRELU)
def rrelu_with_noise(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Not a `plan_rule`, as it writes into its second argument.

    One CPU draws a number for each negative element; how many come before a shard, no rank knows.
    """
    input, noise, lower, upper, training, generator = _torch.arguments(operator, args, kwargs)
    check_placed("rrelu_with_noise", (("self", input), ("noise", noise)))
    layout = drawing_layout(Layout.of(_torch.spec_of(input)))
    x = move(input, layout)
    if not layout.present:
        return layout.absent(x)
    if not training:
        return _torch.wrap(torch.nn.functional.leaky_relu(x, (lower + upper) / 2), layout.spec)
    slope = draw_shard(
        layout, x.device, generator, lambda empty, source: empty.uniform_(lower, upper, generator=source)
    )
    slope = torch.where(x <= 0, slope, 1)
    assign(noise, _torch.wrap(slope, layout.spec))
    return _torch.wrap(x * slope, layout.spec)


def _draw_bernoulli(
    layout: Layout, device: torch.device, p: float, generator: torch.Generator | None, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw this rank's shard of Bernoulli numbers, in `into` if possible."""
    drawn = bernoulli_shard(layout, device, into, p, generator)
    if drawn is not None:
        return drawn
    return draw_shard(layout, device, generator, lambda empty, source: empty.bernoulli_(p, generator=source))
