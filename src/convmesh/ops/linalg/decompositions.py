"""Determinants, solutions and factors of batches of matrices: each rank has whole matrices.

autograd looks at the strides of the matrices to know which way round they were factorised, so each rank's part has to
be in memory as the strides of the whole say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...sharding.layout import Layout
from ...sharding.plan_cache import planned
from ...sharding.redistribute import layouts_of, move, specs_of
from ...sharding.registry import Behaviour, rule

aten = torch.ops.aten

NAMES = ("matrices", "second", "third")
MATRICES = Behaviour("batch dimensions", "nothing; matrices that are cut, to all")


@dataclass(frozen=True)
class MatrixPlan:
    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    here: bool


@rule(
    aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default, aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default, aten.linalg_lu_factor_ex.default, aten.linalg_lu_solve.default,
    aten.linalg_qr.default, aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_matrix_exp.default,
    aten.linalg_solve_triangular.default, behaviour=MATRICES,
)  # fmt: skip
def factorised(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = _torch.arguments(operator, args, kwargs)
    tensors: list[Any] = [value for value in values if isinstance(value, torch.Tensor)]
    specs = specs_of(_torch.name_of(operator), list(zip(NAMES, tensors, strict=False)))
    rest = tuple(values[len(tensors) :])
    plan = _plan(operator, rest, *specs)
    local = [move(tensor, layout) for tensor, layout in zip(tensors, plan.operands, strict=True)]
    if plan.here:
        local[0] = local[0].contiguous() if tensors[0].is_contiguous() else local[0].mT.contiguous().mT
        results = _several(_torch.call(operator, (*local, *rest)))
    else:
        results = tuple(local[0].new_empty(0, dtype=out.dtype) for out in plan.outputs)
    wrapped = tuple(_torch.wrap(result, out.spec) for result, out in zip(results, plan.outputs, strict=True))
    return wrapped[0] if _torch.gives_one_tensor(operator) else wrapped


def _several(results: Any) -> tuple[torch.Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


@planned
def _plan(operator: _torch.Operator, rest: tuple[Any, ...], *specs: _torch.Spec) -> MatrixPlan:
    layouts = layouts_of(_torch.name_of(operator), list(zip(NAMES, specs, strict=False)))
    batch = layouts[0].shape[:-2]
    alike = all(layout.shape[: len(batch)] == batch and len(layout.shape) > len(batch) for layout in layouts)
    placements: tuple[Placement, ...] = tuple(
        p if type(p) is Shard and p.dim < len(batch) and alike else Replicate() for p in layouts[0].placements
    )
    operands = tuple(layout.placed(placements) for layout in layouts)
    whole = [torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device="meta") for t in layouts]
    outputs = tuple(
        Layout(layouts[0].mesh, placements, tuple(seen.shape), tuple(seen.stride()), seen.dtype)
        for seen in _several(_torch.call(operator, (*whole, *rest)))
    )
    return MatrixPlan(operands, outputs, layouts[0].mesh.get_coordinate() is not None)
