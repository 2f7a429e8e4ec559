"""Rules go in without a sound and come out without a trace."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.func import vmap

from convmesh import batching
from convmesh.batching import registration

OPERATORS = ("aten::convolution", "aten::convolution_backward")


def kernels() -> list[str]:
    return [torch._C._dispatch_dump(name) for name in OPERATORS]


def run() -> list[batching.Decision]:
    w = torch.randn(4, 2, 3, 3)
    return batching.explain(vmap(lambda x: torch.conv2d(x, w)), torch.randn(3, 1, 2, 5, 5))


def test_in_and_out() -> None:
    assert batching.installed()
    assert len(run()) == 1
    ours = kernels()
    batching.install()
    assert kernels() == ours
    batching.uninstall()
    stock = kernels()
    assert run() == []
    assert not batching.installed()
    batching.uninstall()
    assert kernels() == stock
    batching.install()
    assert len(run()) == 1
    batching.uninstall()
    assert kernels() == stock


def test_an_error_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batching.uninstall()
    stock = kernels()
    rules = {**registration.RULES, "no_such_operator": registration.RULES["convolution"]}
    monkeypatch.setattr(registration, "RULES", rules)
    with pytest.raises(RuntimeError, match="no_such_operator does not exist"):
        batching.install()
    assert kernels() == stock
    assert not batching.installed()


def test_an_error_in_a_rule_leaves_vmap_usable() -> None:
    w = torch.randn(4, 2, 3, 3)
    with pytest.raises(RuntimeError, match="channels"):
        vmap(lambda x: torch.conv2d(x, w))(torch.randn(3, 1, 5, 5, 5))
    assert len(run()) == 1


def test_no_warning_in_a_fresh_process() -> None:
    code = "from convmesh import batching; batching.install(); batching.uninstall(); batching.install()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
