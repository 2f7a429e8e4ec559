"""The choice: from prices alone, the same every time, and able to say why."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch.func import grad, vmap

import convmesh
from convmesh import batching, kernels
from convmesh.batching import calibration, choice, cost
from convmesh.batching._functorch import Nature
from convmesh.batching.algorithms import Task
from convmesh.batching.contraction import Contraction, Role
from convmesh.batching.machines import OWN
from convmesh.geometry import Convolution

PLAIN = Convolution((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
WIDE = Contraction(Role.KERNEL, PLAIN, (1, 64, 8, 8), (64, 64, 3, 3), (1, 64, 8, 8))
TASK = Task(WIDE, 16, (True, True), Nature.PLAIN, "float32", 4, "cpu", 1, OWN)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No calibration but the one that a test makes."""
    monkeypatch.setenv("CONVMESH_CACHE", str(tmp_path))
    choice.forget()
    yield tmp_path / "batching.json"
    choice.forget()


def cheap(name: str, task: Task = TASK) -> dict[str, cost.Features]:
    """Prices by which one algorithm costs a tenth of the others."""
    usable = [algorithm for algorithm in choice.ALGORITHMS if algorithm.applies(task)]
    flops = {algorithm: 10.0 if algorithm.name == name else 100.0 for algorithm in usable}
    return {cost.key_of(each, task): cost.Features(0, price, 0, 0, 0) for each, price in flops.items()}


def alike(loop: float) -> dict[str, cost.Features]:
    """All cost the same but for the loop; Winograd's multiplications are fewer, and cost more."""
    flops = {"loop": loop, "winograd": 300.0}
    return {key: cost.Features(0, flops.get(key.split("/")[-1], 100.0), 0, 0, 0) for key in cheap("loop")}


@pytest.mark.parametrize("name", ["fold-groups", "unfold", "taps", "direct", "winograd", "loop"])
def test_the_cheapest_is_taken(name: str, cache: Path) -> None:
    cost.save(cheap(name), cache)
    assert choice.choose(TASK).algorithm.name == name


def test_a_small_gain_is_not_worth_a_guess(cache: Path) -> None:
    prices = alike(loop=97.0)
    cost.save(prices, cache)
    assert choice.choose(TASK).algorithm.name == "fold-groups"


def test_a_gain_of_microseconds_is_not_worth_a_call_from_python(cache: Path) -> None:
    cost.save({key: price._replace(flops=1e-3 * price.flops) for key, price in cheap("loop").items()}, cache)
    assert choice.choose(replace(TASK, batch=2)).algorithm.name == "fold-groups"


def test_what_a_fold_left_is_folded_again_unless_much_is_to_be_gained(cache: Path) -> None:
    prices = alike(loop=83.0)
    others = {key.replace("/1/", "/n/"): price for key, price in prices.items()}  # with however many threads this runs
    cost.save({**prices, **others}, cache)
    taken = []

    def convolve(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.conv2d(x, w, padding=1)

    for x in (torch.randn(16, 4, 64, 8, 8), torch.randn(4, 16, 64, 8, 8).transpose(0, 1)):
        gradient = torch.randn_like(x)
        decisions = batching.explain(vmap(grad(lambda w, x, g: (convolve(x, w) * g).sum())), W, x, gradient)
        taken.append([each.algorithm.name for each in decisions if each.task.contraction.wanted is Role.KERNEL])
    assert taken == [["loop"], ["fold-groups"]]


W = torch.zeros(16, 64, 64, 3, 3)


def test_without_prices_the_fold_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "price_table", lru_cache(lambda: cost.PriceTable("an empty table", {})))
    (decision,) = decisions_of(TASK)
    assert decision.algorithm.name == "fold-groups"
    assert "no prices for such a task" in decision.reason


def test_prices_of_other_numbers_and_devices_are_scaled() -> None:
    table, loop = cost.price_table(), choice.ALGORITHMS[-1]
    double = replace(TASK, dtype="float64", itemsize=8)
    seconds = [table.seconds(loop, task) for task in (TASK, double, replace(TASK, threads=8))]
    assert None not in seconds
    assert seconds[1] == pytest.approx(2 * seconds[0] - cost.Features(*table_price(table, loop)).calls * 16e-6)
    assert seconds[2] == seconds[0]
    (decision,) = decisions_of(double)
    assert "scaled from cpu/float32/n" in decision.reason


def table_price(table: cost.PriceTable, algorithm: choice.Algorithm) -> cost.Features:
    return table.prices[cost.key_of(algorithm, TASK, cost.MEASURED)]


def test_a_device_that_was_never_measured_needs_a_very_clear_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = replace(TASK, device="nowhere")
    for price, taken in ((6e3, "fold-groups"), (4e3, "loop")):
        prices = {
            cost.key_of(each, TASK, cost.MEASURED): cost.Features(0, price if each.name == "loop" else 1e4, 0, 0, 0)
            for each in choice.ALGORITHMS
            if each.applies(TASK)
        }
        monkeypatch.setattr(cost, "LAUNCH", 0.0)
        monkeypatch.setattr(cost, "price_table", lru_cache(lambda prices=prices: cost.PriceTable("a table", prices)))
        choice._decide.cache_clear()
        assert choice.choose(elsewhere).algorithm.name == taken


NO_CALIBRATIONS = ["", "{", "[]", '{"prices": 3}', '{"prices": {"a": 1}}', '{"prices": {"a": ["b"]}}', "[" * 10**5]
NO_PRICES = ['{"prices": {"a": [1, NaN, 1, 1, 1]}}', '{"prices": {"a": [-1, 1, 1, 1, 1]}}', '{"prices": {"a": []}}']


@pytest.mark.parametrize("text", [*NO_CALIBRATIONS, *NO_PRICES])
def test_a_file_that_is_no_calibration_is_passed_over(text: str, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text(text)
    (decision,) = decisions_of(TASK)
    assert "built-in table, because a calibration cannot be read" in decision.reason
    choice.choose(replace(TASK, batch=3))
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "cannot be read, and is left alone" in said.message
    assert cache.read_text() == text


@pytest.mark.parametrize("error", [PermissionError("no"), RuntimeError("Could not determine home directory.")])
@pytest.mark.parametrize("where", ["home", "is_file", "read_text"])
def test_an_unreadable_home_is_passed_over(
    error: Exception, where: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object, **__: object) -> None:
        raise error

    assert cost.built_in().prices  # which is no file of the user's
    cache.write_text("")
    if where == "home":
        monkeypatch.setattr(cost, "cache_directory", unreadable)
    else:
        monkeypatch.setattr(Path, where, unreadable)
    x, w = torch.randn(3, 1, 2, 6, 6), torch.randn(3, 4, 2, 3, 3)
    (decision,) = batching.explain(vmap(torch.conv2d), x, w)
    cannot_be_read = ", because a calibration cannot be read" if where == "read_text" else ""
    assert decision.reason.startswith(f"built-in table{cannot_be_read}")
    assert ("cannot be read" in decision.reason) == (where == "read_text")


def test_calibrating_replaces_a_file_that_is_no_calibration(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("{")
    monkeypatch.setattr(calibration, "LAYERS", [(1, 4, 4, 9, 3, 1, 1)])
    monkeypatch.setattr(calibration, "MAPPINGS", ((2, 1, (True, True)),))
    batching.calibrate()
    assert "calibration in" in cost.price_table().source


def test_the_first_call_can_try_all_algorithms() -> None:
    x, w = torch.randn(3, 2, 4, 6, 6), torch.randn(3, 4, 4, 3, 3)
    with convmesh.enable(benchmark=True):
        first, second = (batching.explain(vmap(torch.conv2d), x, w)[0] for _ in range(2))
    assert first.reason.startswith("tried: fold-groups ")
    assert second is first
    assert batching.explain(choice.choose, TASK)[0].reason.startswith("built-in table")


@pytest.mark.parametrize("nature", [nature for nature in Nature if nature is not Nature.SHARDED])
def test_what_lies_beneath_limits_the_choice(nature: Nature, cache: Path) -> None:
    allowed = {
        Nature.PLAIN: {"fold-groups", "unfold", "taps", "direct", "winograd", "loop"},
        Nature.TRACED: {"fold-groups", "unfold", "taps", "loop"},
        Nature.TRACKED: {"fold-groups", "loop"},
        Nature.OPAQUE: {"fold-groups"},
    }
    task = replace(TASK, nature=nature)
    assert {each.name for each in choice.ALGORITHMS if each.applies(task)} == allowed[nature]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("wanted", Role)
def test_the_built_in_table_knows_every_kind_of_layer(threads: int, wanted: Role) -> None:
    table = cost.price_table()
    assert table.source == "built-in table"
    for task in calibration.tasks("cpu", torch.float32):
        if task.contraction.wanted is wanted:
            task = replace(task, threads=threads)
            for algorithm in choice.ALGORITHMS:
                assert not algorithm.applies(task) or table.seconds(algorithm, task) is not None


@pytest.mark.parametrize("compiled", [True, False])
def test_the_built_in_table_leaves_the_fold_where_it_loses(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: compiled)
    image = (1, 512, 4, 4)
    small_and_wide = Contraction(Role.KERNEL, PLAIN, image, (512, 512, 3, 3), image)
    taken = choice.choose(replace(TASK, contraction=small_and_wide)).algorithm.name
    assert taken in (("direct", "unfold") if compiled else ("unfold", "loop"))
    depthwise = Convolution((1, 1), (3, 3), (1, 1), False, (0, 0), 96)
    large_kernel = Contraction(Role.KERNEL, depthwise, (1, 96, 14, 14), (96, 1, 7, 7), (1, 96, 14, 14))
    taken = choice.choose(replace(TASK, contraction=large_kernel)).algorithm.name
    assert taken == ("direct" if compiled else "exchange")


def test_explain_tells_what_and_why() -> None:
    w = torch.randn(4, 2, 3, 3)
    per_sample = vmap(grad(lambda w, x: torch.conv2d(x, w).sum()), (None, 0))
    forward, backward = batching.explain(per_sample, w, torch.randn(3, 1, 2, 5, 5))
    assert str(forward).startswith("response of [B...] x [...], B=3, image [1, 2, 5, 5], kernel [4, 2, 3, 3]")
    assert str(backward).startswith("kernel of [B...] x [B...], B=3")
    assert "fold-groups" in str(backward)
    assert "ms" in backward.reason


def test_the_log_says_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "convmesh.batching"):
        decisions = batching.explain(choice.choose, TASK)
    assert caplog.messages == [str(decision) for decision in decisions]


def test_an_unknown_algorithm_cannot_be_forced() -> None:
    with pytest.raises(ValueError, match="no algorithm is called 'magic'; there are fold-n, "), batching.force("magic"):
        pass


def test_calibration(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost.save({"kept": cost.Features(1, 2, 3, 4, 5, 6)}, cache)
    layers = [(2, 8, 8, 6, 3, 1, 1), (2, 8, 16, 6, 3, 1, 1), (2, 8, 8, 6, 1, 1, 1), (1, 4, 4, 9, 3, 1, 4)]
    monkeypatch.setattr(calibration, "LAYERS", layers)
    monkeypatch.setattr(calibration, "MAPPINGS", ((2, 1, (True, True)), (2, 2, (False, True))))
    assert batching.calibrate(dtypes=(torch.float64,)) == cache
    prices = json.loads(cache.read_text())["prices"]
    assert prices["kept"] == [1, 2, 3, 4, 5, 6]
    measured = {key.split("/")[1] for key in prices if key != "kept"}
    assert measured == {"float64"}
    assert all(price >= 0 for key in prices for price in prices[key])
    assert "calibration in" in cost.price_table().source
    assert list(cache.parent.iterdir()) == [cache]


def test_fit_finds_prices_that_explain_the_times() -> None:
    loop = choice.ALGORITHMS[-1]
    true = (20.0, 10.0, 0.0, 300.0, 0.0, 0.0)
    tasks = [
        replace(TASK, batch=batch, contraction=replace(WIDE, image=(1, 64, n, n), response=(1, 64, n, n)))
        for batch in (2, 5, 16)
        for n in (4, 8, 15)
    ]
    times = [
        sum(price * amount for price, amount in zip(true, cost.features_of(loop, task), strict=True)) for task in tasks
    ]
    table = cost.PriceTable("fitted", calibration.fit(zip(tasks, [loop] * len(tasks), times, strict=True)))
    assert [table.seconds(loop, task) for task in tasks] == pytest.approx(times, rel=0.01)


def decisions_of(task: Task) -> list[batching.Decision]:
    return batching.explain(choice.choose, task)
