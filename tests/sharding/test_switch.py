"""Switching the library on and off, and what it touches of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh import _torch
from tests.cases import place
from tests.compare import assert_close
from tests.harness import Pool

CONVOLUTION = torch.ops.aten.convolution.default


def test_every_private_name_still_exists() -> None:
    missing = [name for owner, name in _torch.REQUIRED if not hasattr(owner, name)]
    # Slots of instances are found on the class; what a release has renamed is not.
    assert not missing


def test_enable_and_disable_are_idempotent_and_restore_what_was_there() -> None:
    before = dict(_torch.handlers())
    convmesh.enable()
    convmesh.enable()
    assert _torch.handlers() != before
    convmesh.disable()
    assert _torch.handlers() == before
    convmesh.disable()
    assert _torch.handlers() == before


def test_as_a_context_manager_it_puts_back_the_state_it_found() -> None:
    before = dict(_torch.handlers())
    with convmesh.enable():
        inside = dict(_torch.handlers())
        with convmesh.enable():
            pass
        assert _torch.handlers() == inside
    assert _torch.handlers() == before
    with pytest.raises(KeyError), convmesh.enable():
        raise KeyError
    assert _torch.handlers() == before


def test_what_others_have_put_there_since_is_left_alone() -> None:
    table = _torch.handlers()
    before = table[CONVOLUTION]
    convmesh.enable()
    table[CONVOLUTION] = print
    convmesh.disable()
    assert table[CONVOLUTION] is print
    table[CONVOLUTION] = before


def test_an_unsupported_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.raises(RuntimeError, match=r"2\.13.*2\.16.*this is torch 2\.16\.0"):
        convmesh.enable()
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    with pytest.raises(RuntimeError, match=r"this is torch 2\.12\.1"):
        convmesh.enable()


def on_after_use(mesh: DeviceMesh) -> None:
    x, w = torch.randn(2, 3, 8, 9, dtype=torch.float64), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    batch, space, weight = place(x, mesh, (0,)), place(x, mesh, (3,)), place(w, mesh, ("R",))
    expected = F.conv2d(x, w, padding=1)
    assert_close(F.conv2d(batch, weight, padding=1).full_tensor(), expected)
    with convmesh.enable():
        assert_close(F.conv2d(space, weight, padding=1).full_tensor(), expected)
    assert_close(F.conv2d(batch, weight, padding=1).full_tensor(), expected)
    with convmesh.enable():
        assert_close(F.conv2d(space, weight, padding=1).full_tensor(), expected)


def test_works_after_operators_have_already_run(pool: Pool) -> None:
    pool.run(on_after_use, mesh=(2,))


def check_attributes(mesh: DeviceMesh) -> None:
    """What Python does with tensors apart from operators, or with functions that look at them first."""
    torch.manual_seed(0)
    attention = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double().eval()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    with torch.no_grad():
        expected = attention(x)
    with convmesh.enable():
        tensor, cut = place(x, mesh, (1,)), place(x * 3, mesh, (2,))
        parameter = torch.nn.Parameter(tensor.clone())
        parameter.data = cut
        assert_close((parameter.detach() * 1).full_tensor(), x * 3)
        assert_close(parameter.data.full_tensor(), x * 3)
        with pytest.raises(convmesh.ShardingError, match="plain"):
            parameter.data = x
        flat = torch.nn.utils.parameters_to_vector([parameter])
        torch.nn.utils.vector_to_parameters(flat / 3, [parameter])
        assert_close(parameter.detach().full_tensor(), x)
        number = tensor.mean()
        assert f"{number:.6f}, {number}" == f"{x.mean():.6f}, {number.item()}"
        with pytest.raises(TypeError):
            format(tensor, ".3f")
        assert number.tolist() == number.item()
        assert_close(torch.from_numpy(place(x, mesh, ("R",)).numpy()), x)
        for refused in (tensor.tolist, tensor.numpy, lambda: torch.func.jvp(torch.relu, (tensor,), (tensor,))):
            # torch's own warnings, when it differentiates so for the first time, are none of ours.
            quiet = warnings.catch_warnings(action="ignore")
            with quiet, pytest.raises(convmesh.ShardingError, match="remedy"):
                refused()
        assert torch.allclose(tensor, parameter)
        assert torch.allclose(tensor, cut / 3 + 1e-12)
        assert not torch.allclose(tensor, parameter + 1e-3)
        convmesh.distribute(attention, mesh)
        with torch.no_grad():
            assert_close(attention(tensor).full_tensor(), expected)
    assert not {"data", "__format__", "tolist", "numpy"} & set(vars(DTensor))


def test_what_python_does_with_tensors(pool: Pool) -> None:
    pool.run(check_attributes, mesh=(2,))


def keys_of_compiled_code(mesh: DeviceMesh) -> list[str]:
    def key() -> str:
        torch.compile(F.relu, backend="aot_eager")(x)
        return torch.compiler.config.cache_key_tag

    x = place(torch.randn(2, 4), mesh, (1,))
    with convmesh.enable():
        before = key()
        assert key() == before
        other = dist.new_group()
        torch.compiler.reset()
        after = key()
        dist.destroy_process_group(other)
    return [before, after, torch.compiler.config.cache_key_tag]


def test_code_compiled_for_another_rank_or_other_process_groups_is_not_taken(pool: Pool) -> None:
    keys = pool.run(keys_of_compiled_code, mesh=(4,))
    assert len({key for before, after, _ in keys for key in (before, after)}) == 8
    assert all(off == "" for *_, off in keys)
