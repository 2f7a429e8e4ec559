"""What ranks decide, they decide alike: with one rank perturbed, all send and compute what they do without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import convmesh
from convmesh.sharding import registry
from tests.batching import test_sharded as mapped
from tests.cases import place
from tests.harness import Pool
from tests.ops import families
from tests.ops.optimizers import test_foreach
from tests.ops.snippets import SHAPE, SNIPPETS
from tests.ops.test_snippets import outputs_and_gradient
from tests.perturbation import Record, kernels, perturbed, record

Program = Callable[[DeviceMesh], Any]
THE_ODD_ONE = 1


def family(name: str, at: Any, mesh: DeviceMesh) -> Any:
    example = families.Example(name)
    placed = [place(t, mesh, (at if n == 0 else "R",)).requires_grad_() for n, t in enumerate(example.tensors)]
    output = example.function(*placed)
    return output, example.backward(output, placed)


def snippet(name: str, mesh: DeviceMesh) -> Any:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return outputs_and_gradient(name, place(x, mesh, (3,)).requires_grad_())[:2]


def optimizer(recipe: test_foreach.Recipe, mesh: DeviceMesh) -> Any:
    return test_foreach.train(recipe, mesh, [(("R",), ("P",))] * 5)


def mapped_convolution(kind: str, where: str, mesh: DeviceMesh) -> Any:
    case = mapped.Sharded(kind, (where,), 4)
    (x, w), (x_at, w_at) = case.tensors(), case.layouts()
    return mapped.KINDS[kind][0](place(x, mesh, x_at), place(w, mesh, w_at))


def clipped(by_gradient: bool, mesh: DeviceMesh) -> Any:
    """A weight whose gradients are Partial, used by clipping and by the optimizer. Some ranks look at theirs."""
    w = nn.Parameter(place(torch.randn(4, 3, 3, 3).double(), mesh, ("R",)))
    steps = torch.optim.SGD([w], 0.1)
    logged = []
    if dist.get_rank() == THE_ODD_ONE:
        w.register_hook(logged.append)
    for step in range(4):
        y = F.conv2d(place(torch.randn(4, 3, 8, 8).double(), mesh, (0,)), w, padding=1)
        if by_gradient:
            y.backward(y.detach() * 2 / y.numel())
        else:
            y.square().mean().backward()
        assert isinstance(w.grad, DTensor)
        logged += [w.grad.to_local()] if step == 1 and dist.get_rank() == 0 else []
        torch.nn.utils.clip_grad_norm_([w], 0.5)
        steps.step()
        steps.zero_grad(set_to_none=step % 2 == 0)
    return w


def trained(folder: Path, mesh: DeviceMesh) -> Any:
    """Gradients in buckets, a norm, dropout; a checkpoint in between, from which another model goes on."""
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 2, 3))
    model = convmesh.distribute(nn.Sequential(*layers).double(), mesh, bucket_bytes=500)
    steps = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(4):
        x = torch.randn(3, 2, 9, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(place(x, mesh, (2,))).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        steps.step()
        steps.zero_grad()
        losses.append(loss)
        if step == 1:
            convmesh.save_checkpoint(folder, model, steps, step=step)
            convmesh.load_checkpoint(folder, model, steps)
    return losses, list(model.parameters()), list(model.buffers())


def programs(folder: Path) -> dict[str, Program]:
    """All that there is: who adds a function to the families, a snippet or an optimizer adds it here."""
    found: dict[str, Program] = {}
    for name in families.FUNCTIONS:
        found |= {f"{name}, {'sharded' if at == 2 else 'replicated'}": partial(family, name, at) for at in (2, "R")}
    found |= {f"snippet: {name}": partial(snippet, name) for name in SNIPPETS}
    recipes = [*test_foreach.RECIPES, *test_foreach.CLIPPED, *test_foreach.SCALED]
    found |= {f"optimizer: {recipe}": partial(optimizer, recipe) for recipe in recipes}
    found |= {f"clipped {by}": partial(clipped, by) for by in (True, False)}
    found |= {
        f"mapped convolution: {kind}, {where}": partial(mapped_convolution, kind, where)
        for kind in mapped.KINDS
        for where in ("mapped", "width")
    }
    return found | {"training": partial(trained, folder)}


def run_all(mesh: DeviceMesh, folder: Path, odd: int | None) -> dict[str, Record]:
    """With the rank `odd` perturbed and without kernels; where there is none, no rank has kernels."""
    records = {}
    with convmesh.enable(), ExitStack() as stack:
        stack.enter_context(kernels(odd not in (None, dist.get_rank())))
        if odd == dist.get_rank():
            stack.enter_context(perturbed())
        for name, program in programs(folder).items():
            try:
                records[name] = record(partial(program, mesh))
            except BaseException as error:
                error.add_note(f"in {name}")
                raise
    return records


@pytest.mark.long("every program that there is runs twice on two ranks")
def test_one_perturbed_rank_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    alone = pool.run(run_all, tmp_path / "alone", None, mesh=(2,), names=("h",), timeout=300)
    beside = pool.run(run_all, tmp_path / "beside", THE_ODD_ONE, mesh=(2,), names=("h",), timeout=300)
    covered = set().union(*(one.families for one in alone[0].values()))
    assert covered == {behaviour.family for behaviour in registry.declared().values()}, "every family has a program"
    for name in alone[0]:
        for run in (alone, beside):
            assert run[0][name].same == run[1][name].same, f"{name}: the ranks have other bits"
            assert run[0][name].sent == run[1][name].sent, f"{name}: the ranks send differently"
        for before, after in zip(alone, beside, strict=True):
            assert before[name].bits == after[name].bits, f"{name}: other bits beside a perturbed rank"
            assert before[name].sent == after[name].sent, f"{name}: sent otherwise beside a perturbed rank"
            assert before[name].sizes == after[name].sizes, f"{name}: sent more or less beside a perturbed rank"
