"""PyTorch's own tools and other people's packages around a distributed model: as around a plain one."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import convmesh
from tests.compare import assert_close
from tests.harness import Pool
from tests.training.small_net import NAMES, assert_same_gradients, build, data, loss_of

DIMS = {"data": 0, "h": 2}


def both(mesh: DeviceMesh) -> list[tuple[nn.Module, DeviceMesh | None]]:
    return [(build(None).eval(), None), (build(mesh).eval(), mesh)]


def check_hooks(mesh: DeviceMesh) -> None:
    """Of modules, of parameters, of all modules, and removed again: called as often, with the same values."""
    seen: list[list[torch.Tensor]] = []
    for where in (None, mesh):
        model = build(None).eval()
        calls: list[torch.Tensor] = []
        handles = [
            model.left.weight.register_hook(lambda gradient: gradient * 2),
            model.left.bias.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.grad.clone())),
        ]
        if where is not None:
            convmesh.distribute(model, where)
        handles += [
            model.left.register_forward_pre_hook(lambda m, args, calls=calls: calls.append(args[0])),
            model.left.register_forward_hook(lambda m, args, out, calls=calls: calls.append(out) or out * 2),
            model.register_forward_hook(lambda m, args, out, calls=calls: calls.append(out)),
            model.left.register_full_backward_hook(lambda m, gi, go, calls=calls: calls.append(go[0])),
            model.head.weight.register_hook(lambda gradient, calls=calls: gradient * 3),
            model.head.bias.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p.detach())),
        ]
        loss_of(model, where, DIMS).backward()
        for handle in handles:
            handle.remove()
        loss_of(model, where, DIMS, 1).backward()
        found = [*calls, *(p.grad for p in model.parameters() if p.grad is not None)]
        seen.append([one.full_tensor() if isinstance(one, DTensor) else one for one in found])
        convmesh.disable()
    assert len(seen[0]) > 6
    for expected, actual in zip(*seen, strict=True):
        assert_close(actual, expected)


def check_counters(mesh: DeviceMesh) -> None:
    """The operations of the global tensors; and what this rank does."""
    counts, names = [], []
    for model, where in both(mesh):
        with FlopCounterMode(display=False) as counter:
            loss_of(model, where, DIMS).backward()
        counts.append(counter.get_total_flops())
        with profile(activities=[ProfilerActivity.CPU]) as found:
            loss_of(model, where, DIMS).backward()
        names.append({event.key for event in found.key_averages()})
    assert counts[0] == counts[1]
    assert "aten::convolution" in names[0] & names[1]


def check_saved(mesh: DeviceMesh) -> None:
    """A module that was saved whole goes on on the same mesh, with its gradients and its ways in."""
    (expected, _), (model, _) = both(mesh)
    loss_of(model, mesh, DIMS).backward()
    model.zero_grad()
    file = io.BytesIO()
    with pytest.warns(UserWarning, match=r"only a job with this mesh can load(?s:.*)convmesh.export"):
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for net, where in ((expected, None), (loaded, mesh)):
        loss_of(net, where, DIMS).backward()
    assert_same_gradients(loaded, expected)


def check_compiled(mesh: DeviceMesh) -> None:
    """Before and after `distribute`; by the function and in place; called before with plain tensors."""
    x, _ = data()
    expected = build(None).eval()
    loss_of(expected, None, DIMS).backward()

    def ran(model: nn.Module) -> nn.Module:
        torch.compile(model, backend="eager")(x)
        return model

    def in_place(model: nn.Module) -> nn.Module:
        model.compile(backend="eager")
        return model

    ways: list[Callable[[nn.Module], Any]] = [
        lambda net: convmesh.distribute(torch.compile(net, backend="eager"), mesh),
        lambda net: torch.compile(convmesh.distribute(net, mesh), backend="eager"),
        lambda net: convmesh.distribute(in_place(net), mesh),
        lambda net: torch.compile(convmesh.distribute(ran(net), mesh), backend="eager"),
    ]
    for way in ways:
        torch.compiler.reset()
        model = way(build(None).eval())
        loss_of(model, mesh, DIMS).backward()
        assert_same_gradients(getattr(model, "_orig_mod", model), expected)


def check_compiled_container(mesh: DeviceMesh) -> None:
    """A module of torch's own class is called by code that is not compiled, with all that goes with a call."""
    image, _ = data()
    x = convmesh.shard(image, mesh, **DIMS)
    for way in (
        lambda net: torch.compile(convmesh.distribute(net, mesh), backend="aot_eager"),
        lambda net: convmesh.distribute(torch.compile(net, backend="aot_eager"), mesh),
    ):
        torch.compiler.reset()
        torch.manual_seed(0)
        expected = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
        model = way(copy.deepcopy(expected))
        model(x).square().mean().backward()
        expected(image).square().mean().backward()
        assert_same_gradients(getattr(model, "_orig_mod", model), expected)


def check_dtypes(mesh: DeviceMesh) -> None:
    for name in ("half", "float", "double", "bfloat16"):
        (expected, _), (model, _) = both(mesh)
        assert getattr(model, name)() is model
        getattr(expected, name)()
        for mine, its in zip(model.state_dict().values(), expected.state_dict().values(), strict=True):
            assert isinstance(mine, DTensor)
            assert mine.placements == (Replicate(), Replicate())
            assert torch.equal(mine.to_local(), its)
    moved = model.to("cpu", torch.float64).cpu()
    loss_of(moved, mesh, DIMS).backward()


def check(mesh: DeviceMesh, name: str) -> None:
    checks = {"hooks": check_hooks, "counters": check_counters, "saved": check_saved, "compiled": check_compiled,
              "container": check_compiled_container}  # fmt: skip
    {**checks, "dtypes": check_dtypes}[name](mesh)
    convmesh.disable()


@pytest.mark.parametrize("name", ["hooks", "counters", "saved", "compiled", "container", "dtypes"])
def test_tools_of_pytorch(pool: Pool, name: str) -> None:
    pool.run(check, name, names=NAMES[:2])


def pictures(mesh: DeviceMesh) -> tuple[list[torch.Tensor], list[DTensor]]:
    scores, labels = torch.rand(4, 3, 7, 8), torch.randint(3, (4, 7, 8))
    return [scores, labels], [convmesh.shard(scores, mesh, data=0, h=2), convmesh.shard(labels, mesh, data=0, h=1)]


def check_torchmetrics(mesh: DeviceMesh) -> None:
    """Counts, sums, lists of all values, collections; not summed over ranks again."""
    from torchmetrics import MeanSquaredError, MetricCollection, SumMetric
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix

    plain, sharded = pictures(mesh)
    metrics: list[tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = [
        (lambda: MulticlassConfusionMatrix(3), lambda x, y: (x, y)),
        (SumMetric, lambda x, y: (x,)),
        (MeanSquaredError, lambda x, y: (x, x * 1.5)),
        (BinaryAUROC, lambda x, y: (x[:, 0], y > 1)),
        (lambda: MetricCollection([MulticlassAccuracy(3), MulticlassConfusionMatrix(3)]), lambda x, y: (x, y)),
    ]
    for make, arguments in metrics:
        expected, metric = make(), convmesh.distribute(make(), mesh)
        for part in expected.modules():
            part.distributed_available_fn = lambda: False  # one process
        for _ in range(2):
            wanted = [expected(*arguments(*plain)), expected.update(*arguments(*plain)), expected.compute()]
            found = [metric(*arguments(*sharded)), metric.update(*arguments(*sharded)), metric.compute()]
            for mine, its in zip(leaves(found), leaves(wanted), strict=True):
                assert_close(mine.full_tensor() if isinstance(mine, DTensor) else mine, its)
            expected.reset()
            metric.reset()
    whole = mesh["h"]
    with pytest.raises(convmesh.ShardingError, match=r"summed over all 4 ranks(?s:.*)sync_on_compute=False"):
        convmesh.distribute(SumMetric(), whole)
    metric = convmesh.distribute(SumMetric(sync_on_compute=False), whole)
    metric.update(convmesh.shard(plain[0], whole, h=2))
    assert_close(metric.compute(), plain[0].sum())


def leaves(values: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@pytest.mark.slow  # `make compat` has no other people's packages
def test_torchmetrics(pool: Pool) -> None:
    pool.run(check_torchmetrics, names=NAMES[:2])


def check_monai(mesh: DeviceMesh) -> None:
    import monai
    from monai.inferers import sliding_window_inference
    from monai.metrics import DiceMetric, HausdorffDistanceMetric
    from monai.transforms import Activations, Compose, RandAdjustContrastd, RandFlipd, RandScaleIntensityd

    convmesh.enable()
    monai.data.set_track_meta(True)  # which a script on these ranks may have switched off
    (scores, _), (sharded, _) = pictures(mesh)
    with pytest.raises(convmesh.ShardingError, match=r"cannot be a MetaTensor(?s:.*)set_track_meta\(False\)"):
        Activations(sigmoid=True)(sharded[0])
    assert type(convmesh.shard(monai.data.MetaTensor(scores), mesh, h=2).to_local()) is torch.Tensor
    monai.data.set_track_meta(False)
    try:
        steps = [
            RandFlipd("x", prob=1, spatial_axis=0),
            RandScaleIntensityd("x", 0.2, prob=1),
            RandAdjustContrastd("x", prob=1),
        ]
        transform = Compose(steps)
        results = [transform.set_random_state(3)({"x": x})["x"] for x in (scores[0], sharded[0])]
        assert_close(results[1].full_tensor(), results[0])
        dice = DiceMetric()
        found = dice((sharded > 0.5).float(), (sharded < 0.7).float())
        assert_close(found.full_tensor(), DiceMetric()((scores > 0.5).float(), (scores < 0.7).float()))
        with pytest.raises(TypeError, match="a metric of global tensors is global already"):
            dice.aggregate()
        warnings.simplefilter("ignore", FutureWarning)  # of MONAI's own code
        with pytest.raises(convmesh.ShardingError, match=r"tensor.full_tensor\(\).numpy\(\)"):
            HausdorffDistanceMetric()((sharded > 0.5).float(), (sharded < 0.7).float())
        net = nn.Conv2d(3, 2, 3, padding=1)
        expected = sliding_window_inference(scores, (4, 4), 2, net, overlap=0.5, mode="gaussian")
        convmesh.distribute(net, mesh)
        with convmesh.implicit_replication(mesh):
            found = sliding_window_inference(sharded, (4, 4), 2, net, overlap=0.5, mode="gaussian")
        assert_close(found.full_tensor(), expected)
    finally:
        monai.data.set_track_meta(True)


@pytest.mark.slow  # `make compat` has no other people's packages
def test_monai(pool: Pool) -> None:
    pool.run(check_monai, names=NAMES[:2])
