"""Operators on lists of tensors, which optimizers are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import convmesh
from convmesh import _torch
from convmesh.ops.optimizers.foreach import OPTIMIZERS, POINTWISE
from convmesh.sharding.registry import declared
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool, RankError
from tests.ops.parameters import SHAPES, gradients


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


def check_pointwise(mesh: DeviceMesh, case: tuple[str, str, int]) -> None:
    name, overload, rotation = case
    operator = getattr(getattr(torch.ops.aten, name), overload)
    at = [("R", "P"), (0, "R"), ("R", 0), ("P", "P"), (0, 0)] if mesh.ndim == 2 else [("R",), (0,), ("P",)]
    arguments = operands(operator, rotation)
    dense = each_tensor(arguments, lambda t, n, i: t.clone())
    expected = operator(*dense)
    with convmesh.enable():
        sharded = each_tensor(arguments, lambda t, n, i: place(t.clone(), mesh, at[(i + n * rotation) % len(at)]))
        actual = operator(*sharded)
        if expected is None:
            actual, expected = sharded[0], dense[0]
        for a, e in zip(actual, expected, strict=True):
            assert_close(a.full_tensor(), e)


@pytest.mark.parametrize(("mesh", "step"), [((3,), 1), ((2, 2), 3)])
def test_every_operator_on_lists(pool: Pool, mesh: tuple[int, ...], step: int) -> None:
    operators = _torch.overloads(*(f"_foreach_{name}" for name in (*POINTWISE, "zero")))
    operators = [operator for operator in operators if operator in declared()]
    names = [(operator._schema.name.removeprefix("aten::"), operator._overloadname) for operator in operators]
    assert len(names) > 120
    cases = [(*name, number % 3) for number, name in enumerate(names)]
    pool.run_cases(check_pointwise, cases[::step], mesh=mesh)


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


@pytest.mark.parametrize(("kind", "text"), [("shape", "different shapes"), ("plain", "plain torch.Tensor"),
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
