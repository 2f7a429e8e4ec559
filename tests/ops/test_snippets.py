"""Lines of other people's models on sharded feature maps: equal to one process, and nothing of the map is gathered."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

import convmesh
from tests.cases import local_shape, place, places_of
from tests.compare import assert_close
from tests.gathers import Sizes, is_whole
from tests.harness import Pool
from tests.ops.snippets import SHAPE, SNIPPETS, UNEVEN

# What is whole on a rank all the same.
WHOLE = {
    "gem": "of a window as large as the map there is one output, and one rank makes it",
    "cosine to prototype": "torch repeats the replicated prototype for every pixel before it divides by its norm",
    "diagonals": "the gradient of a replicated diagonal is replicated zeros, with the diagonal in them",
}
if torch.__version__ < (2, 14):
    WHOLE["cumprod"] = "torch's formula of its gradient begins with plain zeros"
# And where the other factor is cut over the same two ranks.
WHOLE_ON_TWO = {
    "covariance": "the smaller factor of a product whose rows and columns are cut over the same ranks",
}


def outputs_and_gradient(name: str, x: torch.Tensor) -> tuple[list[Any], Any, Sizes]:
    """All results, the gradient that comes from those that have one, and the sizes of what was made for them."""
    # As in the forward pass of a distributed model.
    allowed = convmesh.implicit_replication(x.device_mesh) if isinstance(x, DTensor) else nullcontext()
    with allowed, Sizes() as sizes:
        outputs = tree_flatten(SNIPPETS[name](x))[0]
    heads = [output for output in outputs if output.requires_grad]
    seeds = [_seed(head) for head in heads]
    with sizes:
        return outputs, torch.autograd.grad(heads, x, seeds)[0] if heads else None, sizes


def _seed(output: torch.Tensor) -> torch.Tensor:
    numbers = torch.arange(output.numel(), dtype=torch.float64).sin().view(output.shape)
    if not isinstance(output, DTensor):
        return numbers
    return place(numbers, output.device_mesh, tuple("R" if at == "P" else at for at in places_of(output)))


def check_snippet(mesh: DeviceMesh, case: tuple[str, tuple[Any, ...], tuple[int, ...]]) -> bool:
    """Returns whether the map was whole on this rank."""
    name, at, shape = case
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected, expected_gradient, one = outputs_and_gradient(name, x.clone().requires_grad_())
    with convmesh.enable():
        actual, gradient, many = outputs_and_gradient(name, place(x, mesh, at).requires_grad_())
        for mine, wanted in zip([*actual, gradient], [*expected, expected_gradient], strict=True):
            _compare(mine, wanted)
    whole = is_whole(one, many, x)
    allowed = WHOLE if mesh.size() > 2 else WHOLE | WHOLE_ON_TWO
    assert name in allowed or not whole, (
        f"{many.largest} bytes by {many.maker}, {many.received_at_once} arrived at once"
    )
    return whole


def _compare(actual: Any, expected: Any) -> None:
    if expected is None:
        assert actual is None
        return
    scale = max([1.0, *expected.detach().double().abs().flatten().tolist()])
    if isinstance(actual, DTensor):
        assert actual.to_local().shape == local_shape(actual), f"{actual.to_local().shape} at {actual.placements}"
        actual = actual.detach().full_tensor()
    assert_close(actual.detach(), expected.detach(), scale)


@pytest.mark.parametrize(("mesh", "at", "shape"), [((2,), (3,), SHAPE), ((2, 2), (2, 3), UNEVEN)])
def test_snippets_stay_sharded(pool: Pool, mesh: tuple[int, ...], at: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    results = pool.run_cases(check_snippet, [(name, at, shape) for name in SNIPPETS], mesh=mesh)
    found = {name for name, ranks in zip(SNIPPETS, results, strict=True) if any(ranks)}
    assert found == set(WHOLE if mesh != (2,) else WHOLE | WHOLE_ON_TWO)


def refused(mesh: DeviceMesh) -> list[str]:
    """What compiled code cannot know, and what a mask does not fit."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    told = []
    with convmesh.enable():
        placed = place(x, mesh, (2,))
        for wrong in (
            lambda: placed[place(x[:, :2] > 0, mesh, ("R",))],
            lambda: placed.index_put((placed > 0,), place(x.flatten()[:3], mesh, ("R",))),
            lambda: placed.topk(20, 2),
            lambda: placed.bmm(placed),
        ):
            with pytest.raises(convmesh.ShardingError) as error:
                wrong()
            told.append(str(error.value))
        with pytest.raises(RuntimeError, match="how much a mask selects") as unknown:
            torch.compile(lambda x: x[x > 0].sum(), fullgraph=True, backend="aot_eager")(placed)
        assert "remedy" in str(unknown.value)
        with pytest.raises(IndexError) as out:
            place(x.flatten(), mesh, (0,)).gather(0, place(torch.full((20,), x.numel()), mesh, (0,)))
        told.append(str(out.value))
        with pytest.raises(RuntimeError) as label:
            torch.nn.functional.one_hot(place(torch.arange(12), mesh, (0,)), 5)
        told.append(str(label.value))
    return told


def test_bad_input_is_refused_alike_on_all_ranks(pool: Pool) -> None:
    first, *others = pool.run(refused, mesh=(4,))
    assert all(told == first for told in others)
    assert all("remedy" in text for text in first[:4])
