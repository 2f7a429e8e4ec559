"""The choice: by a list or by the clock, the same every time, and able to say why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap

import convmesh
from convmesh import batching, kernels
from convmesh.batching import benchmark, choice
from convmesh.batching._functorch import Nature
from convmesh.batching.algorithms import Task
from convmesh.batching.contraction import Contraction, Role
from convmesh.batching.machines import OWN
from convmesh.geometry import Convolution
from convmesh.kernels import measurements

BOTH, IMAGES, KERNELS = (True, True), (True, False), (False, True)


def task(
    wanted: Role = Role.KERNEL,
    channels: tuple[int, int] = (64, 64),
    size: int = 8,
    taps: int = 3,
    stride: int = 1,
    groups: int = 1,
    mapped: tuple[bool, bool] = BOTH,
    N: int = 1,
    dims: int = 2,
    **others: object,
) -> Task:
    geometry = Convolution((stride,) * dims, (taps // 2,) * dims, (1,) * dims, False, (0,) * dims, groups)
    C, O = channels  # noqa: E741
    sizes, kernel = (size,) * dims, (taps,) * dims
    shapes = (N, C, *sizes), (O, C // groups, *kernel), (N, O, *geometry.output_size(sizes, kernel))
    made = Task(Contraction(wanted, geometry, *shapes), 16, mapped, Nature.PLAIN, "float32", 4, "cpu", 1, OWN)
    return replace(made, **others)


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No measurements but those that a test makes."""
    assert kernels.available()
    monkeypatch.setenv("CONVMESH_CACHE", str(tmp_path))
    choice.forget()
    yield
    choice.forget()


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (task(), "winograd"),
        (task(Role.IMAGE, mapped=IMAGES), "winograd"),
        (task(taps=5), "direct"),
        (task(channels=(8, 8)), "direct"),
        (task(channels=(5, 8), dims=3), "winograd"),
        (task(channels=(4, 4), dims=3), "direct"),
        (task(Role.IMAGE, channels=(8, 8), dims=3), "direct"),
        (task(stride=2), "direct"),
        (task(channels=(3, 64)), "direct"),
        (task(channels=(512, 512), size=4), "direct"),  # few places
        (task(Role.RESPONSE, channels=(512, 512), size=4), "winograd"),
        (task(Role.RESPONSE, taps=1, mapped=IMAGES), "direct"),
        (task(Role.IMAGE, taps=1, stride=2, mapped=IMAGES), "direct"),
        (task(Role.RESPONSE, taps=1), "direct"),
        (task(Role.RESPONSE, channels=(3, 64), taps=7, mapped=KERNELS), "direct"),
        (task(Role.IMAGE, channels=(3, 64), taps=7, mapped=KERNELS), "direct"),
        (task(Role.RESPONSE, size=32, taps=5, N=4, mapped=KERNELS), "direct"),
        (task(Role.RESPONSE, size=8, taps=5, mapped=KERNELS), "direct"),
        (task(Role.RESPONSE, size=32, mapped=KERNELS), "winograd"),
        (task(Role.RESPONSE, channels=(16, 4), mapped=KERNELS), "winograd"),  # all samples' channels count
        (task(Role.RESPONSE, channels=(16, 4)), "direct"),
        (task(Role.RESPONSE, channels=(16, 16), dims=3, mapped=KERNELS), "winograd"),
        (task(Role.RESPONSE, channels=(24, 24), dims=3, mapped=KERNELS), "winograd"),
        (task(Role.RESPONSE, size=32, taps=5, N=4, mapped=KERNELS, dtype="float64", itemsize=8), "direct"),
        (task(Role.IMAGE, channels=(64, 3), taps=7, mapped=KERNELS), "direct"),
        (task(channels=(96, 96), taps=7, groups=96), "direct"),
        (task(Role.RESPONSE, channels=(96, 96), taps=7, groups=96), "direct"),
        (task(Role.RESPONSE, channels=(96, 96), taps=7, groups=96, mapped=KERNELS), "direct"),
        (task(channels=(64, 64), groups=8), "direct"),
        (task(channels=(64, 64), groups=16), "direct"),
        (task(batch=1), "fold-groups"),
        (task(batch=0), "fold-groups"),
        (task(nature=Nature.TRACED), "fold-groups"),
        (task(nature=Nature.OPAQUE), "fold-groups"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_the_list(of: Task, name: str) -> None:
    decision = choice.choose(of)
    assert decision.algorithm.name == name
    assert decision.as_torch == (name.startswith("fold") and of.nature is Nature.PLAIN)


def test_without_kernels_and_on_other_devices_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.choose(task(device="cuda")).algorithm.name == "fold-groups"
    monkeypatch.setattr(kernels, "available", lambda: False)
    choice.forget()
    decision = choice.choose(task())
    assert decision.algorithm.name == "fold-groups"
    assert "enable(benchmark=True)" in decision.reason


@pytest.mark.parametrize("way", ["float64", "exact", "deterministic"])
def test_nothing_that_rounds_more_where_a_result_is_to_be_exact(way: str) -> None:
    x, w = torch.randn(3, 2, 16, 9, 9), torch.randn(3, 16, 16, 3, 3)
    x[0, 0, 0, 3, 3] = torch.inf  # of which a transform adds and subtracts several
    convolve = vmap(torch.conv2d)
    plain = convolve(x, w)
    assert [each.algorithm.name for each in batching.explain(convolve, x, w)] == ["winograd"]
    try:
        if way == "deterministic":
            torch.use_deterministic_algorithms(True)
        with convmesh.enable(exact=way == "exact"):
            tensors = (x.double(), w.double()) if way == "float64" else (x, w)
            exact = convolve(*tensors)  # also where such a call is known from before
            assert [each.algorithm.name for each in batching.explain(convolve, *tensors)] == ["direct"]
            with batching.force("winograd"), pytest.raises(ValueError, match="winograd is forced, but does not apply"):
                convolve(*tensors)
            with convmesh.enable():  # leaves it as it is
                assert choice.settings().exact == (way == "exact")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [int((~each.isfinite()).sum()) for each in (exact, plain)] == [16 * 9, 16 * 9]
    assert [bool(each.isnan().any()) for each in (exact, plain)] == [False, True]
    assert not choice.settings().is_exact
    batching.install()
    assert torch.equal(convolve(x, w).isfinite(), plain.isfinite())


def clock(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """By which one algorithm is the fastest; and how often it was asked."""
    asked: list[int] = []

    def say(candidates: dict[choice.Algorithm, object], device: str) -> dict[choice.Algorithm, float]:
        asked.append(len(candidates))
        return {each: 1e-3 if each.name == name else 2e-3 for each in candidates}

    monkeypatch.setattr(benchmark, "interleaved", say)
    return asked


X, W = torch.randn(3, 2, 4, 6, 6), torch.randn(3, 4, 4, 3, 3)


def taken(*tensors: torch.Tensor) -> str:
    (decision,) = batching.explain(vmap(torch.conv2d), *tensors)
    return decision.algorithm.name


def test_a_shape_is_measured_once_and_the_disk_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = clock(monkeypatch, "loop")
    with convmesh.enable(benchmark=True):
        (decision,) = batching.explain(vmap(torch.conv2d), X, W)
        assert str(decision).endswith("direct 2.00 ms, winograd 2.00 ms, loop 1.00 ms)")
        vmap(torch.conv2d)(X, W)
        assert (taken(X, W), len(asked)) == ("loop", 1)
        asked_anew = clock(monkeypatch, "direct")
        choice.forget()  # as a new process
        assert (taken(X, W), asked_anew) == ("loop", [])
        for others in ((X.double(), W.double()), (X[:2], W[:2])):
            assert taken(*others) == "direct"
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        try:
            assert taken(X, W) == "direct"
        finally:
            torch.set_num_threads(threads)
        assert len(asked_anew) == 3
        monkeypatch.setattr(measurements, "_machine", lambda: "another processor")
        choice.forget()
        assert taken(X, W) == "direct"
    batching.install()
    assert taken(X, W) == "direct"  # by the list


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, '{"a": 1}'])
def test_what_cannot_be_read_is_measured_anew(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock(monkeypatch, "loop")
    path = measurements.path_of("fastest", torch.get_num_threads())
    path.write_text(text)
    with convmesh.enable(benchmark=True):
        assert taken(X, W) == "loop"
        choice.forget()
        assert taken(X, W) == "loop"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warned) == (text != '{"a": 1}')
    assert list(path.parent.iterdir()) == [path]


def test_an_algorithm_that_is_gone_is_not_taken_from_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with convmesh.enable(benchmark=True):
        clock(monkeypatch, "loop")
        taken(X, W)
        threads = torch.get_num_threads()
        (key,) = measurements.read("fastest", threads)
        measurements.add("fastest", threads, {key: "magic measured: 0 ms"})
        choice.forget()
        assert taken(X, W) == "loop"


def test_a_cache_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CONVMESH_CACHE", "/dev/null/nowhere")
    clock(monkeypatch, "loop")
    with convmesh.enable(benchmark=True):
        assert taken(X, W) == "loop"
    assert "measurements are not kept" in caplog.text


def test_the_clock_tells_candidates_apart() -> None:
    seconds = benchmark.interleaved(
        {"slow": lambda: torch.ones(2**20).sum(), "quick": lambda: None}, "cpu", budget=0.01
    )
    assert min(seconds, key=lambda name: seconds[name]) == "quick"


@pytest.mark.parametrize("nature", [nature for nature in Nature if nature is not Nature.SHARDED])
def test_what_lies_beneath_limits_the_choice(nature: Nature) -> None:
    allowed = {
        Nature.PLAIN: {"fold-groups", "direct", "winograd", "unfold", "loop"},
        Nature.TRACED: {"fold-groups", "unfold", "loop"},
        Nature.TRACKED: {"fold-groups", "loop"},
        Nature.OPAQUE: {"fold-groups"},
    }
    of = task(nature=nature)
    assert {each.name for each in choice.ALGORITHMS if each.applies(of)} == allowed[nature]


def test_explain_tells_what_and_why() -> None:
    w = torch.randn(4, 2, 3, 3)
    per_sample = vmap(grad(lambda w, x: torch.conv2d(x, w).sum()), (None, 0))
    forward, backward = batching.explain(per_sample, w, torch.randn(3, 1, 2, 5, 5))
    assert str(forward).startswith("response of [B...] x [...], B=3, image [1, 2, 5, 5], kernel [4, 2, 3, 3]")
    assert str(backward).startswith("kernel of [B...] x [B...], B=3")
    assert str(backward).endswith("direct (operands are read as they lie, and nothing but the result is written)")


def test_the_log_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "convmesh.batching"):
        decisions = batching.explain(choice.choose, task())
    assert caplog.messages == [str(decision) for decision in decisions]


def test_an_unknown_algorithm_cannot_be_forced() -> None:
    with pytest.raises(ValueError, match="no algorithm is called 'magic'; there are fold-n, "), batching.force("magic"):
        pass
