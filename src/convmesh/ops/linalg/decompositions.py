"""Determinants, solutions and factors of batches of matrices: a rank has all of each of its matrices.

autograd looks at the strides of the matrices to know which way round they were factorised, so local tensors are in
memory in the order of the full tensor's strides.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...sharding.layout import Layout
from ...sharding.registry import Behaviour
from ...sharding.sharding_table import R, Row, Shard
from ...sharding.table_rule import table_rule

aten = torch.ops.aten

MATRICES = Behaviour("batch dimensions", "nothing; all-gather of matrices that are sharded themselves")
MOST = 4  # results


@table_rule(
    aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default, aten.linalg_inv_ex.default,
    aten.linalg_cholesky_ex.default, aten.linalg_lu_factor_ex.default, aten.linalg_lu_solve.default,
    aten.linalg_qr.default, aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_matrix_exp.default,
    aten.linalg_solve_triangular.default, behaviour=MATRICES, prepare=Layout.laid,
)  # fmt: skip
def decomposition(matrices: Layout, *rest: object) -> Iterator[Row]:
    operands = [matrices, *(argument for argument in rest if isinstance(argument, Layout))]
    yield Row("replicated", (R,) * len(operands), (R,) * MOST)
    batch = matrices.shape[:-2]
    if all(layout.shape[: len(batch)] == batch and layout.ndim > len(batch) for layout in operands):
        for dim in range(len(batch)):
            yield Row("batch", (Shard(dim),) * len(operands), (Shard(dim),) * MOST)
