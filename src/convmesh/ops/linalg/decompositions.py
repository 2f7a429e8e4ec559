"""Determinants, solves and factorizations of batches of matrices: each matrix is on one rank in full.

autograd checks whether a matrix is contiguous to know whether its transpose was factorized: so local tensors are
contiguous exactly where full tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, Shard
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

MATRICES = Behaviour(
    "batch dimensions",
    "nothing; sharded matrices: an all-to-all to the batch, or they are gathered if there is no batch",
)
MAX_RESULTS = 4  # results of any of these operators


def _contiguous_alike(layout: Layout, local: torch.Tensor) -> torch.Tensor:
    """Make the local matrices row-major where the full tensor is contiguous, else column-major."""
    if layout.is_contiguous or not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        return local.contiguous()
    return local.mT.contiguous().mT


@table_rule(
    aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default, aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default, aten.linalg_lu_factor_ex.default, aten.linalg_lu_solve.default,
    aten.linalg_qr.default, aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_matrix_exp.default,
    aten.linalg_solve_triangular.default, behaviour=MATRICES, prepare=_contiguous_alike,
)  # fmt: skip
def decomposition(matrices: Layout, *rest: object) -> Iterator[Row]:
    operands = [matrices, *(argument for argument in rest if isinstance(argument, Layout))]
    yield Row("replicated", (R,) * len(operands), (R,) * MAX_RESULTS)
    batch = matrices.shape[:-2]
    if all(layout.shape[: len(batch)] == batch and layout.ndim > len(batch) for layout in operands):
        for dim in range(len(batch)):
            yield Row("batch", (Shard(dim),) * len(operands), (Shard(dim),) * MAX_RESULTS)
