"""Reads after writes in compiled code, across inference mode, and in the gradients."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import convmesh
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool


def write_compiled(mesh: DeviceMesh, backend: str) -> None:
    """Writes of compiled code reach no copy of what they write: refused, unless the part is taken within it."""
    x = torch.arange(14, dtype=torch.float64).view(2, 7)
    torch._dynamo.reset()
    warnings.simplefilter("ignore")  # a compiler imports what is deprecated, and asks for gradients of what is no leaf
    compiled = partial(torch.compile, backend=backend, fullgraph=True)
    with convmesh.enable(), torch.no_grad():
        y = place(x, mesh, (1,))
        assert_close(compiled(lambda t: t.mul_(2)[:, 2:6] + 1)(y).full_tensor(), (2 * x)[:, 2:6] + 1)
        v = y[:, 2:6]
        for step, given in (
            (lambda t: t.add_(1), (y,)),
            (lambda part: part.add_(1), (v,)),
            (lambda t, part: (t.add_(1), part * 2), (y, v)),
        ):
            # While it is compiled, or when it runs.
            with pytest.raises((ValueError, RuntimeError), match="slice within the compiled function"):
                compiled(step)(*given)
        assert_close(y.full_tensor(), 2 * x)
        assert_close(v.full_tensor(), (2 * x)[:, 2:6])
    with convmesh.enable():  # in training a compiler leaves such writes to eager code, which puts them back
        y = place(x, mesh, (1,)).requires_grad_() * 1.0
        v = y[:, 2:6]
        compiled(lambda t: t.mul_(3))(y)
        assert_close(v.detach().full_tensor(), (3 * x)[:, 2:6])


def test_writes_of_compiled_code(pool: Pool) -> None:
    pool.run_cases(write_compiled, ["aot_eager", "inductor"], mesh=(2,))


def out_of_inference_mode(mesh: DeviceMesh) -> None:
    x = torch.arange(7, dtype=torch.float64)
    with convmesh.enable():
        with torch.inference_mode():
            y = place(x, mesh, (0,)) * 1.0
            v = y[2:5]
            y.add_(1)
        assert_close(v.full_tensor(), (x + 1)[2:5])
        z = place(x, mesh, (0,)) * 1.0
        w = z[2:5]
        with torch.inference_mode():
            z.add_(1)
            assert_close((w * 2).full_tensor(), 2 * (x + 1)[2:5])


def test_inference_mode_ends_between_write_and_read(pool: Pool) -> None:
    pool.run(out_of_inference_mode, mesh=(2,))


def differentiate(mesh: DeviceMesh | None) -> list[torch.Tensor]:
    """Reading a part after the write that it shows; and what backward reads of a part that was saved for it."""
    x = torch.linspace(-1, 2, 14, dtype=torch.float64).view(2, 7)
    leaf = (x if mesh is None else place(x, mesh, (1,))).requires_grad_()
    y = leaf * 1.0
    v = y[:, 2:5]
    y.mul_(leaf)
    (v.square() * v).sum().backward()
    z = leaf * 1.0
    w = z.detach()[:, 2:5]
    total = (leaf[:, 2:5] * w).sum()
    z.data.add_(1)  # what autograd does not count
    total.backward()
    assert leaf.grad is not None
    return [leaf.grad if mesh is None else leaf.grad.full_tensor()]


def differentiate_on(mesh: DeviceMesh) -> None:
    with convmesh.enable():
        for mine, wanted in zip(differentiate(mesh), differentiate(None), strict=True):
            assert_close(mine, wanted)
        y = place(torch.ones(2, 7), mesh, (1,)).requires_grad_() * 1.0
        v = y[:, 2:5]
        loss = v.square().sum()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients(pool: Pool) -> None:
    pool.run(differentiate_on, mesh=(2,))
