"""Metrics of MONAI on sharded tensors: as on one process, and never gathered from other processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.training.small_net import NAMES


def check_monai_metrics(mesh: DeviceMesh) -> None:
    """Values of each batch, of all of them, and what is kept where there are batches, lists and several buffers."""
    import monai
    from monai import metrics

    monai.data.set_track_meta(False)
    warnings.simplefilter("ignore", FutureWarning)  # of MONAI's own code
    torch.manual_seed(0)
    scores, labels = torch.rand(3, 2, 5, 4, dtype=torch.float64), torch.randint(2, (3, 1, 5, 4))
    classes = F.one_hot(labels[:, 0], 2).movedim(-1, 1).double()
    picked = F.one_hot(scores.argmax(1), 2).movedim(-1, 1).double()
    samples, targets = scores[:, :, 0, 0], classes[:, :, 0, 0]
    cases: list[tuple[Callable[[], Any], list[torch.Tensor]]] = [
        (partial(metrics.DiceMetric, include_background=False), [picked, classes]),
        (partial(metrics.DiceMetric, reduction="mean_batch", return_with_label=True), [picked, classes]),
        (partial(metrics.DiceMetric, num_classes=2, reduction="none", get_not_nans=True), [picked, labels]),
        (metrics.ConfusionMatrixMetric, [picked, classes]),
        (metrics.ROCAUCMetric, [samples, targets]),
    ]
    for make, given in cases:
        expected, mine = metric_alone(make()), convmesh.distribute(make(), mesh)
        assert isinstance(mine, type(expected))
        assert len(mine) == 0
        sharded = [convmesh.shard(one, mesh, data=0, **({"h": 2} if one.ndim > 2 else {})) for one in given]
        for _ in range(2):
            compare_leaves(mine(*sharded), expected(*given))
            compare_leaves(mine(*(list(one[1:]) for one in sharded)), expected(*(list(one[1:]) for one in given)))
            assert len(mine) == len(expected) == 5
            compare_leaves(mine.get_buffer(), expected.get_buffer())
            compare_leaves(mine.aggregate(), expected.aggregate())
            expected.reset()
            mine.reset()
    with pytest.raises(convmesh.ShardingError, match="distributed already"):
        convmesh.distribute(mine, mesh)
    with pytest.raises(convmesh.ShardingError, match="one mesh of all ranks"):
        convmesh.distribute(metrics.DiceMetric(), mesh["h"])


def metric_alone(metric: Any) -> Any:
    """As it is on one process."""
    metric._sync = lambda: vars(metric).update(_synced_tensors=[torch.stack(b) for b in metric._buffers or []])
    return metric


def compare_leaves(found: Any, wanted: Any) -> None:
    found, wanted = (torch.utils._pytree.tree_leaves(one) for one in (found, wanted))
    for mine, its in zip(found, wanted, strict=True):
        mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
        if isinstance(its, torch.Tensor):
            assert_close(mine, its)
        else:
            assert mine == pytest.approx(its)


@pytest.mark.slow  # `make compat` has no other people's packages
def test_monai_metrics(pool: Pool) -> None:
    pool.run(check_monai_metrics, names=NAMES[:2])
