"""The verdict on one case of conformance: sharded against dense, and whether anything was gathered."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_map

import convmesh
from convmesh.comm import all_reduce
from tests.cases import place, places_of
from tests.compare import assert_close
from tests.gathers import Sizes, why_whole
from tests.opinfo import Case, Family, operators, samples_of, tensors_of

# From best to worst; a case is as bad as its worst rank. An error is anything but a ShardingError, or a hang.
VERDICTS = ("not dense either", "right", "gathered", "refused", "error", "wrong")
FAULTS = ("error", "wrong")
# Of smaller samples every rank needs most for a result of its own, and so they do not tell whether something is whole.
TELLING_BYTES = 512
# What a window reads of a neighbour stays as large when a tensor is so many times as long, and a gather grows with it.
LONGER = 8


Verdict = tuple[str, str]
"""One of VERDICTS, and what there is to say about it."""


Given = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A sample: the input, the other arguments, and those by name."""


def _outputs(fn: Any, sample: Given, change: Any, gradients: Any) -> tuple[list[Any], list[Any], Sizes]:
    """The results and the gradients of all tensors of the sample, each of which `change` has been applied to, and the
    sizes of what was made and sent for them."""
    given = tree_map(lambda t: change(t) if torch.is_tensor(t) else t, sample)
    torch.default_generator.manual_seed(1)
    with Sizes() as sizes:
        results = tensors_of(fn(given[0], *given[1], **given[2]))
    leaves = [t for t in tensors_of(given) if t.requires_grad]
    heads = [t for t in results if t.requires_grad]
    if not heads or not leaves:
        # An operator that returns nothing has written into its input.
        return results or tensors_of(given[0]), [], sizes
    seeds = [gradients(t) for t in heads]
    with sizes:
        found = torch.autograd.grad(heads, leaves, seeds, allow_unused=True)
    return results, list(found), sizes


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, like.numel(), dtype=like.dtype).reshape(like.shape)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@lru_cache(maxsize=4)
def _dense(operator: str, variant: str, in_place: bool, number: int, longer: int | None) -> Any:
    """A sample, and what one device makes of it; the error's text of those that are made to be refused by the operator.

    The input, and what has its shape, may be `longer` in that dimension.
    """
    fn, samples = samples_of(operator, variant, in_place)
    given: Given = (samples[number].input, samples[number].args, samples[number].kwargs)
    try:
        if longer is not None:
            given = _longer(given, longer)
        return given, _outputs(fn, given, _fresh, _numbers)
    except Exception as error:
        return given, str(error)


def _longer(given: Given, dim: int) -> Given:
    shapes = {t.shape for t in tensors_of(given[0])}

    def changed(leaf: Any) -> Any:
        if not torch.is_tensor(leaf) or leaf.shape not in shapes:
            return leaf
        return torch.cat([leaf.detach()] * LONGER, dim).requires_grad_(leaf.requires_grad)

    longer: Given = tree_map(changed, given)
    return longer


def judge(mesh: DeviceMesh, case: Case, family: Family, longer: int | None = None) -> Verdict:
    """This rank's verdict on a case, whose input may be `longer` in a dimension."""
    sample, dense = _dense(case.operator, case.variant, case.in_place, case.sample, longer)
    if isinstance(dense, str):
        return "not dense either", dense
    inputs = tensors_of(sample[0])
    shapes = {t.shape for t in inputs if t.dim() > case.dim}
    own = {id(t) for t in inputs}

    def is_cut(t: torch.Tensor) -> bool:
        return t.shape in shapes and (id(t) in own or not family.alone)

    def sharded(t: torch.Tensor) -> torch.Tensor:
        # Further mesh dimensions shard the dimensions that follow.
        at = [(case.dim + further) % t.dim() if is_cut(t) else "R" for further in range(mesh.ndim)]
        return place(t.detach().clone(), mesh, tuple(at)).requires_grad_(t.requires_grad)

    def gradient(t: torch.Tensor) -> torch.Tensor:
        # As DTensor gives it: the gradient of a pending sum is the same for all of its terms.
        at = tuple("R" if p == "P" else p for p in places_of(t))  # type: ignore[arg-type]
        return place(_numbers(torch.empty(t.shape, dtype=t.dtype)), mesh, at)

    try:
        results = _outputs(samples_of(case.operator, case.variant, case.in_place)[0], sample, sharded, gradient)
    except convmesh.ShardingError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    try:
        for mine, wanted in zip([*results[0], *results[1]], [*dense[0], *dense[1]], strict=True):
            _compare(mine, wanted, family.elementwise)
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    replicated = [t for t in tensors_of(sample) if not is_cut(t)]
    why = _gathered(mesh, case.dim, inputs, replicated, dense[2], results[2])
    return ("gathered", why) if why else ("right", "")


def judge_twice(mesh: DeviceMesh, case: Case, family: Family) -> Verdict:
    """What any rank takes for gathered, all of them judge once more, with a longer input if one device takes that."""
    verdict = judge(mesh, case, family)
    if not all_reduce(torch.tensor(float(verdict[0] == "gathered")), mesh, range(mesh.ndim), "max"):
        return verdict
    again = judge(mesh, case, family, case.dim)
    return verdict if again[0] == "not dense either" else again


def _gathered(
    mesh: DeviceMesh, dim: int, inputs: list[torch.Tensor], replicated: list[torch.Tensor], one: Sizes, many: Sizes
) -> str:
    """How this rank has made a tensor as large as the largest of one device, or got most of one at once; empty if not.

    Of replicated tensors, such as parameters, each rank has the gradient too.
    """
    size = max((t.shape[dim] for t in inputs if t.dim() > dim), default=0)
    given = max((t.nbytes for t in inputs), default=0)
    beside = max((_padded(t, mesh.size()) for t in replicated), default=0)
    if size < 2 * mesh.size() or given < TELLING_BYTES or given <= beside:
        return ""
    return why_whole(one, many, *inputs)


def _padded(tensor: torch.Tensor, ranks: int) -> int:
    """How many bytes a gathered tensor has: as torch pads parts of one length."""
    parts = [tensor.nbytes // max(1, size) * -(-size // ranks) * ranks for size in tensor.shape]
    return max([tensor.nbytes, *parts])


def _compare(actual: Any, expected: torch.Tensor | None, elementwise: bool) -> None:
    """This rank's part with what it should be. A gradient that is missing is one of zeros."""
    if actual is None and expected is None:
        return
    if not isinstance(actual, DTensor):
        like = expected if actual is None else actual
        zeros = torch.zeros_like(like)  # type: ignore[arg-type]
        assert_close(zeros if actual is None else actual, zeros if expected is None else expected)
        return
    expected = torch.zeros(actual.shape, dtype=actual.dtype) if expected is None else expected.detach()
    # The samples and the gradients that we give are numbers of about 1: what is far below it is what has cancelled.
    scale = max([1.0, *expected[expected.isfinite()].double().abs().tolist()])
    if any(isinstance(p, Partial) for p in actual.placements):
        assert_close(actual.detach().full_tensor(), expected, scale, elementwise)
        return
    wanted = place(expected, actual.device_mesh, places_of(actual)).to_local()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert_close(actual.detach().to_local(), wanted, scale, elementwise)


def judge_all(mesh: DeviceMesh, batch: list[Case], family: Family, stock: bool) -> list[Verdict]:
    with warnings.catch_warnings(), nullcontext() if stock else convmesh.enable():
        warnings.simplefilter("ignore")
        return [judge_twice(mesh, case, family) for case in batch]


def load(mesh: DeviceMesh) -> None:
    """New processes take their time to import all samples, which is not to count against a case."""
    operators()
