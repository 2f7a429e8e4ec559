"""`torchrun ... -m tests.selftest.broken FOLDER`: the self-test of a library one of whose operators is wrong."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.cli import main

if __name__ == "__main__":
    convmesh.enable()
    rules = DTensor._op_dispatcher._custom_op_handlers
    average = torch.ops.aten.avg_pool2d.default
    rule = rules[average]

    def slightly_more(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return rule(operator, args, kwargs) * 1.001

    rules[average] = slightly_more
    sys.exit(main(["selftest", "--quick", "--only", "convolution", "avg_pool", "lp_pool", "--out", sys.argv[1]]))
