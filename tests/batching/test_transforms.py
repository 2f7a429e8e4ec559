"""The rules under every other transform of torch.func, and under the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from tests.batching.compositions import Composition, some_compositions
from tests.batching.forcing import by, by_each
from tests.batching.oracle import assert_same, loop_and_stack

B = 3

# torch itself scripts some functions when forward-mode differentiation is first used.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def plain(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, stride=(2, 1), padding=1, groups=2)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, stride=(2, 1), padding=1, output_padding=(1, 0), groups=2)


def depthwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w[:, :1], padding=1, groups=4)


def pointwise(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x[:, :2], w[:, :, :1, :1], stride=2)


def loss_of(conv: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: conv(x, w).sin().sum()


def operands() -> tuple[Tensor, Tensor]:
    """x and w for both kinds of convolution."""
    return torch.randn(B, 2, 4, 5, 4).double(), torch.randn(B, 4, 2, 3, 2).double()


both = pytest.mark.parametrize("conv", [plain, transposed])
any_dims = pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0)])
every_kind = pytest.mark.parametrize("conv", [plain, transposed, depthwise, pointwise])


def some(dims: tuple[int | None, ...]) -> list[Tensor]:
    return [value if dim == 0 else value[0] for value, dim in zip(operands(), dims, strict=True)]


def compare(function: Callable[..., object], want: object, *args: Tensor, least: Sequence[str] = ("loop",)) -> None:
    """By each algorithm that applies to some of it, and these at `least`."""
    found = by_each(function, *args)
    assert set(least) <= found.keys()
    for got in found.values():
        assert_same(got, want)


@every_kind
@any_dims
def test_vmap_of_grad(conv, dims) -> None:
    one = grad(loss_of(conv), (0, 1))
    args = some(dims)
    compare(vmap(one, dims), loop_and_stack(one, dims, *args), *args, least=("loop", "direct"))


@every_kind
@any_dims
def test_grad_of_vmap(conv, dims) -> None:
    def looped(*args: Tensor) -> Tensor:
        return loop_and_stack(loss_of(conv), dims, *args).square().sum()

    def mapped(*args: Tensor) -> Tensor:
        return vmap(loss_of(conv), dims)(*args).square().sum()

    args = some(dims)
    compare(grad(mapped, (0, 1)), grad(looped, (0, 1))(*args), *args)


@every_kind
@any_dims
def test_ordinary_autograd_through_vmap_twice(conv, dims) -> None:
    def second(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(1)
        args = [arg.requires_grad_() for arg in some(dims)]
        first = torch.autograd.grad(function(*args).square().sum(), args, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), args)

    want = second(lambda *args: loop_and_stack(loss_of(conv), dims, *args))
    compare(lambda: second(vmap(loss_of(conv), dims)), want)


@both
@pytest.mark.parametrize(
    ("outer", "inner"), [((0, None), (0, 0)), ((0, 0), (0, None)), ((None, 0), (0, 0)), ((0, 0), (0, 0))]
)
def test_nested_vmap(conv, outer, inner) -> None:
    x, w = torch.randn(2, B, 2, 4, 5, 4).double(), torch.randn(2, B, 4, 2, 3, 2).double()
    args = []
    for value, out, into in zip((x, w), outer, inner, strict=True):
        value = value if out == 0 else value[0]
        args.append(value if into == 0 else value.select(1 if out == 0 else 0, 0))
    one = grad(loss_of(conv), (0, 1))
    want = loop_and_stack(lambda *a: loop_and_stack(one, inner, *a), outer, *args)
    assert_same(vmap(vmap(one, inner), outer)(*args), want)


@both
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
@pytest.mark.parametrize("argnum", [0, 1])
def test_jacobians(conv, jacobian, argnum) -> None:
    x, w = (value[0] for value in operands())
    want = torch.autograd.functional.jacobian(conv, (x, w))[argnum]
    assert_same(jacobian(conv, argnum)(x, w), want)


@both
def test_hessian(conv) -> None:
    x, w = (value[0] for value in operands())
    got = hessian(loss_of(conv), (0, 1))(x, w)
    assert_same(got, torch.autograd.functional.hessian(loss_of(conv), (x, w)))


@both
@any_dims
def test_jvp_both_ways_round(conv, dims) -> None:
    tangents = [torch.randn_like(value) for value in some(dims)]

    def push(*values: Tensor) -> Tensor:
        return jvp(conv, values[:2], values[2:])[1]

    args = [*some(dims), *tangents]
    want = loop_and_stack(push, (*dims, *dims), *args)
    assert_same(vmap(push, (*dims, *dims))(*args), want)
    assert_same(jvp(vmap(conv, dims), tuple(args[:2]), tuple(tangents))[1], want)


def test_forward_ad_outside_of_torch_func() -> None:
    x, w = operands()
    tangent = torch.randn_like(w)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, tangent)
        got = torch.autograd.forward_ad.unpack_dual(vmap(plain)(x, dual)).tangent
    assert_same(got, loop_and_stack(plain, (0, 0), x, tangent))


@both
def test_double_backward_per_sample(conv) -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        return grad(loss_of(conv))(x, w).square().sum()

    x, w = operands()
    assert_same(vmap(grad(penalty, (0, 1)))(x, w), loop_and_stack(grad(penalty, (0, 1)), (0, 0), x, w))


@both
def test_chunks(conv) -> None:
    x, w = operands()
    one = grad(loss_of(conv), (0, 1))
    assert_same(vmap(one, chunk_size=2)(x, w), loop_and_stack(one, (0, 0), x, w))


def test_vjp_of_vmap() -> None:
    x, w = operands()
    y, pull = vjp(vmap(plain), x, w)
    cotangent = torch.randn_like(y)
    want = loop_and_stack(lambda x, w, c: vjp(plain, x, w)[1](c), (0, 0, 0), x, w, cotangent)
    assert_same(pull(cotangent), want)


def test_randomness_is_untouched() -> None:
    x, w = operands()
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: F.dropout(plain(x, w[0])))(x)
    torch.manual_seed(0)
    got = vmap(lambda x: F.dropout(plain(x, w[0])), randomness="different")(x)
    assert not torch.equal(got[0] == 0, got[1] == 0)


@both
@any_dims
def test_compiled(conv, dims) -> None:
    one, args = grad(loss_of(conv), (0, 1)), some(dims)
    torch.compiler.reset()
    assert_same(torch.compile(vmap(one, dims), backend="aot_eager")(*args), loop_and_stack(one, dims, *args))


@pytest.mark.parametrize(
    ("conv", "algorithm"),
    [(plain, "unfold"), (transposed, "unfold"), (plain, "loop"), (pointwise, "unfold")],
)
def test_compiled_by(conv, algorithm) -> None:
    one, args = grad(loss_of(conv), (0, 1)), operands()
    torch.compiler.reset()
    compiled = torch.compile(vmap(one), backend="aot_eager")
    assert_same(by(algorithm, compiled, *args), loop_and_stack(one, (0, 0), *args))


def test_compiled_with_symbolic_sizes() -> None:
    torch.compiler.reset()
    compiled = torch.compile(vmap(plain), backend="aot_eager", dynamic=True)
    for size in (5, 6):
        x, w = torch.randn(B, 2, 4, size, 4).double(), operands()[1]
        assert_same(compiled(x, w), loop_and_stack(plain, (0, 0), x, w))


def test_dispatch_modes_see_what_runs() -> None:
    x, w = operands()
    vmap(plain)(x, w)
    with FlopCounterMode(display=False) as counter:
        vmap(plain)(x, w)
    with FlopCounterMode(display=False) as looped:
        loop_and_stack(plain, (0, 0), x, w)
    assert counter.get_total_flops() == looped.get_total_flops()


@pytest.mark.parametrize("composition", list(some_compositions(250, seed=0)), ids=str)
def test_compositions(composition: Composition) -> None:
    composition.check()


@pytest.mark.parametrize("outer", [None, 0])
def test_a_level_that_maps_no_operand_passes_by(outer: int | None) -> None:
    """What vmap maps may have nothing to do with a convolution, whose operands another level maps, or none."""
    x, w = (value if outer == 0 else value[0] for value in operands())
    beside = torch.ones(2)
    gradients = grad(loss_of(plain), (0, 1))
    for one in (plain, gradients):
        inner = vmap(lambda _, x, w, one=one: one(x, w), (0, None, None))
        got = vmap(inner, (None, outer, outer))(beside, x, w) if outer == 0 else inner(beside, x, w)
        want = loop_and_stack(one, (0, 0), x, w) if outer == 0 else one(x, w)
        for each, expected in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            for i in range(2):
                assert_same(each.select(1 if outer == 0 else 0, i), expected)


@pytest.mark.parametrize("kind", ["negated", "conjugated", "zeros"])
def test_values_that_are_not_what_memory_holds(kind: str) -> None:
    x, w = operands()
    if kind == "negated":
        x = torch._neg_view(x)
    elif kind == "conjugated":
        x = torch.complex(x, 2 * x).conj()
        w = torch.complex(w, w)
    else:
        x = torch._efficientzerotensor(x.shape, dtype=x.dtype)
    for got in by_each(vmap(plain), x, w).values():
        assert_same(got, loop_and_stack(plain, (0, 0), x, w))
    of_weight = grad(lambda w, x: plain(x, w).abs().square().sum())
    for got in by_each(vmap(of_weight), w, x).values():
        assert_same(got, loop_and_stack(of_weight, (0, 0), w, x))
