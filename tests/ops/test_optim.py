"""Optimizers, gradient clipping, loss scaling, and the operators on lists that these are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_

import convmesh
from convmesh import _torch
from convmesh.ops.optim import OPTIMIZERS, POINTWISE
from convmesh.sharding.registry import declared, overloads
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool, RankError

SHAPES = [(6, 5), (7,), (3, 2, 3, 3), (1, 4), (2, 9)]

# For every tensor of SHAPES: where the parameter is, and where its gradient comes.
PLACES: dict[str, tuple[tuple[int, ...], list[tuple[tuple[Any, ...], tuple[Any, ...]]]]] = {
    "replicated, gradients pending": ((4,), [(("R",), ("P",))] * 5),
    "sharded": ((4,), [((0,), (0,))] * 5),
    "mixed": ((4,), [((0,), (0,)), (("R",), ("P",)), ((1,), (1,)), (("R",), ("R",)), ((0,), ("P",))]),
    "2x2": (
        (2, 2),
        [((0, 1), (0, 1)), (("R", "R"), ("P", "P")), (("R", 0), ("P", 0)), ((1, 1), (1, 1)), ((1, "R"), (1, "P"))],
    ),
}


@dataclass(frozen=True)
class Recipe:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    clip: bool | None = None  # whether to clip gradients, with foreach or without
    scaled: bool = False

    def optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.name)(parameters, lr=0.1, **self.options)
        return made


RECIPES = [
    Recipe(name, {**options, **how})
    for name, options in [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adam", {}),
        ("AdamW", {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("RMSprop", {"momentum": 0.5, "centered": True}),
    ]
    for how in ({"foreach": False}, {"foreach": True}, {"fused": True})
    if not (name == "RMSprop" and "fused" in how)
]
CLIPPED = [Recipe("Adam", {"foreach": foreach}, clip=foreach) for foreach in (True, False)]
SCALED = [Recipe("Adam", how, scaled=True) for how in ({"foreach": False}, {"foreach": True}, {"fused": True})]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def _own(tensor: DTensor) -> DTensor:
    """In memory of its own, as a gradient is that autograd has made."""
    return _torch.wrap(_torch.local_of(tensor).clone(), _torch.spec_of(tensor))


def train(recipe: Recipe, mesh: DeviceMesh | None, places: list[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """Three steps; the parameters, and how many all-reduces each step took. One gradient of the second overflows."""
    start = gradients(100)
    parameters = [t if mesh is None else place(t, mesh, at) for t, (at, _) in zip(start, places, strict=True)]
    parameters = [p.detach().clone().requires_grad_() for p in parameters]
    optimizer, reductions = recipe.optimizer(parameters), []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=recipe.scaled)
    scaler.scale(torch.zeros(()))
    for step in range(3):
        for number, (parameter, g, (_, at)) in enumerate(zip(parameters, gradients(step), places, strict=True)):
            if recipe.scaled:
                g = g * scaler.get_scale()
                if step == 1 and number == 2:
                    g.view(-1)[-1] = float("inf")
            parameter.grad = g if mesh is None else _own(place(g, mesh, at))
        with CommDebugMode() as communication:
            scaler.unscale_(optimizer)
            if recipe.clip is not None:
                clip_grad_norm_(parameters, 0.5, foreach=recipe.clip)
            scaler.step(optimizer)
            scaler.update()
        counts = communication.get_comm_counts()
        assert not any("gather" in str(kind) for kind in counts), counts
        reductions.append(sum(count for kind, count in counts.items() if "all_reduce" in str(kind)))
    return [p.detach() for p in parameters], reductions


def check_training(mesh: DeviceMesh, case: tuple[Recipe, str]) -> list[int]:
    recipe, where = case
    places = PLACES[where][1]
    expected, _ = train(recipe, None, places)
    with convmesh.enable():
        actual, reductions = train(recipe, mesh, places)
        for parameter, value, (at, _) in zip(actual, expected, places, strict=True):
            assert isinstance(parameter, DTensor)
            assert parameter.placements == place(value, mesh, at).placements
            assert_close(parameter.full_tensor(), value)
    return reductions


@pytest.mark.parametrize("where", PLACES)
def test_training_is_that_of_one_process(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(recipe, where) for recipe in RECIPES], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(1, 1, 1)}, "all gradients travel at once"
    if where == "sharded":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(0, 0, 0)}


@pytest.mark.parametrize("where", PLACES)
def test_clipping_and_scaling(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(r, where) for r in [*CLIPPED[:1], *SCALED]], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(1, 1, 1)}, "the first use reduces for all"


@pytest.mark.parametrize("where", PLACES)
def test_clipping_tensor_by_tensor(pool: Pool, where: str) -> None:
    counts = pool.run_cases(check_training, [(CLIPPED[1], where)], mesh=PLACES[where][0])
    if where == "replicated, gradients pending":
        assert {tuple(count) for by_rank in counts for count in by_rank} == {(5, 5, 5)}, "each gradient is reduced once"


def check_clipping(mesh: DeviceMesh, case: tuple[str, float, bool]) -> None:
    where, order, foreach = case
    places, plain = PLACES[where][1], [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for parameter, g in zip(plain, gradients(5), strict=True):
        parameter.grad = g
    expected = clip_grad_norm_(plain, 0.3, order, foreach=foreach)
    with convmesh.enable():
        sharded = [place(torch.zeros_like(p), mesh, at) for p, (at, _) in zip(plain, places, strict=True)]
        for parameter, g, (_, at) in zip(sharded, gradients(5), places, strict=True):
            parameter.grad = _own(place(g, mesh, at))
        total = torch.nn.utils.get_total_norm([p.grad for p in sharded], order, foreach=foreach)
        clipped = clip_grad_norm_(sharded, 0.3, order, error_if_nonfinite=True, foreach=foreach)
        for actual in (total, clipped):
            assert_close(actual.full_tensor(), expected)
        for parameter, value in zip(sharded, plain, strict=True):
            assert_close(parameter.grad.full_tensor(), value.grad)
        sharded[1].grad.fill_(float("nan"))
        with pytest.raises(RuntimeError, match="non-finite"):
            clip_grad_norm_(sharded, 0.3, order, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize("where", PLACES)
def test_clipping_by_several_norms(pool: Pool, where: str) -> None:
    cases = [(where, order, foreach) for order in (1.0, 2.0, 3.0, float("inf")) for foreach in (False, True)]
    pool.run_cases(check_clipping, cases, mesh=PLACES[where][0])


def operands(operator: Any, index: int) -> list[Any]:
    """Arguments for an operator on lists, by the types that its schema has."""
    generator = torch.Generator().manual_seed(index)

    def numbers() -> list[torch.Tensor]:
        return [torch.rand(shape, generator=generator, dtype=torch.float64) * 0.8 + 0.1 for shape in SHAPES]

    made: list[Any] = []
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            made.append(numbers())
        elif kind == "List[number]":
            made.append([0.1 * n + 0.5 for n in range(len(SHAPES))])
        elif kind == "Tensor":
            vector = argument.name == "scalars"
            made.append(torch.full((len(SHAPES),) if vector else (), 0.7, dtype=torch.float64))
        elif kind == "number" and not argument.has_default_value():
            made.append(0.6)
        elif kind in ("number", "Optional[int]", "bool"):
            break
        else:
            raise AssertionError(f"{operator}: no sample for {kind}")
    return made


def each_tensor(arguments: list[Any], change: Any) -> list[Any]:
    """`arguments` with `change(tensor, number of the list, number in the list)` for the tensors in lists."""
    return [
        [change(t, n, i) for i, t in enumerate(value)]
        if isinstance(value, list) and torch.is_tensor(value[0])
        else value
        for n, value in enumerate(arguments)
    ]


def check_pointwise(mesh: DeviceMesh, case: tuple[str, str]) -> None:
    name, overload = case
    operator = getattr(getattr(torch.ops.aten, name), overload)
    at = [("R", "P"), (0, "R"), ("R", 0), ("P", "P"), (0, 0)] if mesh.ndim == 2 else [("R",), (0,), ("P",)]
    for rotation in range(3):
        arguments = operands(operator, rotation)
        dense = each_tensor(arguments, lambda t, n, i: t.clone())
        expected = operator(*dense)

        def placed(t: torch.Tensor, n: int, i: int, rotation: int = rotation) -> DTensor:
            return place(t.clone(), mesh, at[(i + n * rotation) % len(at)])

        with convmesh.enable():
            sharded = each_tensor(arguments, placed)
            actual = operator(*sharded)
            if expected is None:
                actual, expected = sharded[0], dense[0]
            for a, e in zip(actual, expected, strict=True):
                assert_close(a.full_tensor(), e)


def test_every_operator_on_lists(pool: Pool) -> None:
    operators = overloads(*(f"_foreach_{name}" for name in (*POINTWISE, "zero")))
    operators = [operator for operator in operators if operator in declared()]
    cases = [(operator._schema.name.removeprefix("aten::"), operator._overloadname) for operator in operators]
    assert len(cases) > 120
    pool.run_cases(check_pointwise, cases, mesh=(3,))
    pool.run_cases(check_pointwise, cases[::3], mesh=(2, 2))


def check_functional(mesh: DeviceMesh, name: str) -> None:
    """The fused optimizers that return what the others write."""
    operator = getattr(torch.ops.aten, f"_fused_{name}").default
    lists = [argument for argument in operator._schema.arguments if str(argument.type) == "List[Tensor]"]
    numbers = [[t.abs() for t in gradients(i)] for i in range(len(lists))]
    if lists[-1].name == "state_steps":
        numbers[-1] = [torch.tensor(2.0) for _ in SHAPES]
    options = {
        argument.name: {"bool": argument.name == "amsgrad", "float": 0.1}[str(argument.type)]
        for argument in operator._schema.arguments
        if str(argument.type) in ("bool", "float")
    }
    expected = operator(*numbers, **options)
    at = [[((0,), ("P",), (0,))[n % 3] for n in range(len(lists))], [("R",), ("P",), *[("R",)] * len(lists)]]
    for places in at:
        placed = [
            [t if t.dim() == 0 else place(t, mesh, where) for t in some]
            for some, where in zip(numbers, places, strict=False)
        ]
        with convmesh.enable():
            for mine, theirs in zip(operator(*placed, **options), expected, strict=True):
                for a, e in zip(mine, theirs, strict=True):
                    assert_close(a.full_tensor() if isinstance(a, DTensor) else a, e)


def test_fused_optimizers_that_return(pool: Pool) -> None:
    pool.run_cases(check_functional, list(OPTIMIZERS), mesh=(4,))


def check_norms(mesh: DeviceMesh, order: float) -> None:
    tensors = gradients(7)
    at = [(0,), ("R",), ("P",), (1,), (0,)] if mesh.ndim == 1 else [(0, 1), ("P", 0), (0, "P"), (1, 1), ("R", "R")]
    for dtype in (torch.float64, torch.bfloat16):
        plain = [t.to(dtype) for t in tensors]
        expected = torch._foreach_norm(plain, order)
        with convmesh.enable(), CommDebugMode() as communication:
            actual = torch._foreach_norm([place(t, mesh, p) for t, p in zip(plain, at, strict=True)], order)
        assert not any("gather" in str(kind) for kind in communication.get_comm_counts())
        for a, e in zip(actual, expected, strict=True):
            assert a.dtype == e.dtype
            assert_close(a.full_tensor(), e)
    with convmesh.enable():
        largest = torch._foreach_max([place(t, mesh, p) for t, p in zip(tensors, at, strict=True)])
    for a, e in zip(largest, torch._foreach_max(tensors), strict=True):
        assert_close(a.full_tensor(), e)


def check_nan(mesh: DeviceMesh, order: float) -> None:
    """Wherever it is, and although backends lose it in a comparison."""
    for index in range(8):
        value = torch.arange(8.0)
        value[index] = float("nan")
        with convmesh.enable():
            (norm,), (largest,) = (reduce([place(value, mesh, (0,))]) for reduce in (
                lambda some: torch._foreach_norm(some, order), torch._foreach_max))  # fmt: skip
        assert norm.full_tensor().isnan()
        assert largest.full_tensor().isnan()


def test_norms_of_what_is_not_a_number(pool: Pool) -> None:
    pool.run_cases(check_nan, [1.0, 2.0, float("inf"), -float("inf")], mesh=(4,))


def test_norms_of_lists(pool: Pool) -> None:
    for mesh in ((4,), (2, 2)):
        pool.run_cases(check_norms, [0.0, 1.0, 2.0, 3.0, -1.0, float("inf"), -float("inf")], mesh=mesh)


def check_shared_memory(mesh: DeviceMesh) -> None:
    """A tensor that another one looks into stays where it is, and both see what is written."""
    value = gradients(1)[0]
    tensor = place(value, mesh, ("P",))
    view = tensor.detach()
    with convmesh.enable():
        torch._foreach_sqrt_([tensor])
    assert tensor.placements == view.placements
    assert_close(tensor.full_tensor(), value.sqrt())
    assert_close(view.full_tensor(), value.sqrt())


def test_shared_memory(pool: Pool) -> None:
    pool.run(check_shared_memory, mesh=(4,))


def refused(mesh: DeviceMesh, kind: str) -> None:
    one, other = place(gradients(1)[0], mesh, (0,)), place(gradients(1)[4], mesh, (0,))
    with convmesh.enable():
        if kind == "shape":
            torch._foreach_add([one], [other])
        elif kind == "plain":
            torch._foreach_add([one], [torch.ones(6, 5, dtype=torch.float64)])
        else:
            torch._fused_sgd_(
                [one, one], [one], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=True,
            )  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), [("shape", "differ in shape"), ("plain", "plain torch.Tensor"),
                                            ("length", "differ in length")])  # fmt: skip
def test_refusals(pool: Pool, kind: str, text: str) -> None:
    with pytest.raises(RankError, match=text):
        pool.run(refused, kind, mesh=(2,))


def check_plain_among_others(mesh: DeviceMesh) -> None:
    """Parameters that are plain tensors may be in one optimizer with those that are not."""
    a, b, *_ = gradients(3)
    with convmesh.enable():
        sharded, plain = torch._foreach_mul([place(a, mesh, (0,)), b], [place(a, mesh, ("P",)), b])
    assert_close(sharded.full_tensor(), a * a)
    assert_close(plain, b * b)


def test_plain_tensors_among_others(pool: Pool) -> None:
    pool.run(check_plain_among_others, mesh=(2,))


def compiled_step(mesh: DeviceMesh) -> None:
    tensors, others = gradients(1), gradients(2)

    def update(parameters: list[torch.Tensor], pending: list[torch.Tensor]) -> list[torch.Tensor]:
        torch._foreach_mul_(pending, 0.5)
        torch._foreach_addcmul_(parameters, pending, pending, 0.1)
        return torch._foreach_abs(parameters)

    expected = update([t.clone() for t in tensors], [t.clone() for t in others])
    parameters = [place(t, mesh, (0,)) for t in tensors]
    pending = [place(t, mesh, ("P",)) for t in others]
    with convmesh.enable():
        actual = torch.compile(update, fullgraph=True, backend="aot_eager")(parameters, pending)
        for a, e in zip(actual, expected, strict=True):
            assert_close(a.full_tensor(), e)
        for a, e in zip(pending, others, strict=True):
            assert_close(a.full_tensor(), e * 0.5)


def test_under_compile(pool: Pool) -> None:
    pool.run(compiled_step, mesh=(2,))
