"""PyTorch's own sample inputs, mapped: the input alone, the weight alone, and both."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from tests.batching.oracle import assert_same, loop_and_stack

with warnings.catch_warnings():
    # torch's test tools warn about optional packages and their own deprecated parts.
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

NAMES = [f"nn.functional.conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)]
OPERATORS = {operator.name: operator for operator in op_db if operator.name in NAMES}


# torch's own remark on padding="same" with an even kernel, which is among the samples.
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)])
def test_samples(name: str, dims: tuple[int | None, int | None]) -> None:
    operator = OPERATORS[name]
    count = 0
    for sample in operator.sample_inputs("cpu", torch.float64, requires_grad=False):
        weight, *others = sample.args

        def one(x: Tensor, w: Tensor, others=others, kwargs=sample.kwargs) -> Tensor:
            return operator.op(x, w, *others, **kwargs)

        args = [
            value if dim is None else torch.stack([value, value + 1, -value])
            for value, dim in zip((sample.input, weight), dims, strict=True)
        ]
        want = loop_and_stack(one, dims, *args)
        assert_same(vmap(one, dims)(*args), want)
        # The inner level maps nothing of the operator, as in torch's own tests of batching rules.
        inner = vmap(lambda _, x, w, one=one: one(x, w), (0, None, None))
        assert_same(vmap(inner, (0, *dims))(torch.ones(3, 1), *args)[:, 0], want)
        gradients = grad(lambda x, w, one=one: one(x, w).sin().sum(), (0, 1))
        assert_same(vmap(gradients, dims)(*args), loop_and_stack(gradients, dims, *args))
        count += 1
    assert count > 5
