"""`make conformance`: PyTorch's own samples of every operator family, sharded, against the dense operator.

Nobody here wrote the cases: they are the OpInfo samples that PyTorch tests its operators with. Each one runs sharded on
each dimension of its input in turn, over 2 and over 4 ranks, forward and backward.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

import convmesh
from convmesh.sharding.registry import declared
from tests.cases import place, places_of
from tests.compare import assert_close
from tests.gathers import Gathers
from tests.harness import Pool, RankError

RANKS = (2, 4)
# From best to worst; a case is as bad as its worst rank.
VERDICTS = ("not dense either", "right", "gathered", "refused", "error", "wrong")
BATCH = 30
BATCH_SECONDS, ALONE_SECONDS = 45.0, 15.0


@dataclass(frozen=True)
class Family:
    operators: tuple[str, ...]
    rules: tuple[str, ...]  # if one of these aten operators has a rule, then the family is ours to answer for

    @property
    def ours(self) -> bool:
        names = {operator._schema.name.removeprefix("aten::") for operator in declared()}
        return any(name in names for name in self.rules)


def _functional(*names: str) -> tuple[str, ...]:
    return tuple(f"nn.functional.{name}" for name in names)


def _of_each(*stems: str) -> tuple[str, ...]:
    return _functional(*(f"{stem}{d}d" for stem in stems for d in (1, 2, 3)))


FAMILIES = {
    "convolution": Family(_of_each("conv", "conv_transpose"), ("convolution",)),
    "pooling": Family(
        _of_each("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool"),
        ("max_pool2d_with_indices", "avg_pool2d"),
    ),
    "normalisation": Family(
        _functional("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "local_response_norm"),
        ("native_batch_norm", "native_group_norm", "native_layer_norm", "_native_batch_norm_legit"),
    ),
    "resampling": Family(
        _functional("interpolate", "upsample_bilinear", "upsample_nearest", "pixel_shuffle", "pixel_unshuffle",
                    "grid_sample"),
        ("upsample_bilinear2d", "upsample_nearest2d"),
    ),
    "padding": Family((*_functional("pad"), "constant_pad_nd"), ("constant_pad_nd", "reflection_pad2d")),
    "indexing": Family(
        ("select", "slice", "narrow", "split", "chunk", "slice_scatter", "select_scatter", "stack", "cat", "flip",
         "roll", "index_select", *_functional("unfold")),
        ("select", "slice", "flip"),
    ),
    "linear": Family(_functional("linear", "scaled_dot_product_attention", "gelu"), ("addmm", "mm", "linear")),
    "losses": Family(
        _functional("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                    "binary_cross_entropy_with_logits", "kl_div", "nll_loss", "cross_entropy"),
        ("mse_loss", "nll_loss_forward"),
    ),
    "reductions": Family(
        ("sum", "mean", "var", "std", "var_mean", "amax", "amin", "argmax", "argmin", "norm", "linalg.vector_norm"),
        ("mean", "var", "amax"),
    ),
    "foreach": Family(
        ("_foreach_neg", "_foreach_reciprocal", "_foreach_sqrt", "_foreach_abs", "_foreach_add", "_foreach_sub",
         "_foreach_mul", "_foreach_div", "_foreach_addcdiv", "_foreach_addcmul", "_foreach_pow", "_foreach_lerp",
         "_foreach_norm", "_foreach_max", "_foreach_maximum", "_foreach_clamp_min", "_foreach_clamp_max"),
        ("_foreach_add",),
    ),
    "random": Family(_functional("dropout", "alpha_dropout", "dropout2d", "feature_alpha_dropout"), ("bernoulli_",)),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    operator: str
    variant: str
    sample: int
    dim: int


@lru_cache(maxsize=1)
def _operators() -> dict[str, list[Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as samples

    found: dict[str, list[Any]] = {}
    lists = [getattr(samples, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    for info in [*samples.op_db, *(info for some in lists for info in some)]:
        found.setdefault(info.name, []).append(info)
    return found


@lru_cache(maxsize=4)
def _samples(operator: str, variant: str) -> tuple[Any, list[Any]]:
    """The operator, and all samples; the same on every rank, since all start from one seed."""
    info = next(info for info in _operators()[operator] if info.variant_test_name == variant)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if operator.startswith("_foreach"):
            sizes = {"num_input_tensors": [3]}
            return info.method_variant, list(info.sample_inputs("cpu", torch.float64, noncontiguous=False, **sizes))
        differentiable = bool(info.supports_autograd)
        return info.op, list(info.sample_inputs("cpu", torch.float64, requires_grad=differentiable))


def cases(family: str, most: int) -> Iterator[Case]:
    """At most `most` samples of each operator, spread over all that there are."""
    for operator in FAMILIES[family].operators:
        for info in _operators().get(operator, []):
            samples = _samples(operator, info.variant_test_name)[1]
            for number in range(0, len(samples), max(1, -(-len(samples) // most))):
                dims = max((t.dim() for t in tree_flatten(samples[number].input)[0] if torch.is_tensor(t)), default=0)
                yield from (Case(operator, info.variant_test_name, number, dim) for dim in range(dims))


def _outputs(fn: Any, sample: Any, change: Any, gradients: Any) -> tuple[list[Any], list[Any]]:
    """The results and the gradients of all tensors of the sample, each of which `change` has been applied to."""
    given = tree_map(lambda t: change(t) if torch.is_tensor(t) else t, (sample.input, sample.args, sample.kwargs))
    torch.manual_seed(1)
    results = [t for t in tree_flatten(fn(given[0], *given[1], **given[2]))[0] if torch.is_tensor(t)]
    leaves = [t for t in tree_flatten(given)[0] if torch.is_tensor(t) and t.requires_grad]
    heads = [t for t in results if t.requires_grad]
    if not heads or not leaves:
        return results, []
    found = torch.autograd.grad(heads, leaves, [gradients(t) for t in heads], allow_unused=True)
    return results, list(found)


def _numbers(like: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 2, like.numel(), dtype=like.dtype).reshape(like.shape)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def judge(mesh: DeviceMesh, case: Case) -> tuple[str, str]:
    """The verdict on a case, the same on all ranks, and what this rank has to say about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn, samples = _samples(case.operator, case.variant)
        verdict, reason = _judge_here(mesh, case, fn, samples[case.sample])
        worst = torch.tensor([VERDICTS.index(verdict)])
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=mesh.get_group(0))
    return VERDICTS[int(worst)], reason


def _judge_here(mesh: DeviceMesh, case: Case, fn: Any, sample: Any) -> tuple[str, str]:
    try:
        expected, expected_gradients = _outputs(fn, sample, _fresh, _numbers)
    except Exception as error:  # some samples are made to be refused by the operator itself
        return "not dense either", str(error)
    inputs = [t for t in tree_flatten(sample.input)[0] if torch.is_tensor(t)]
    shapes = {t.shape for t in inputs if t.dim() > case.dim}

    def sharded(t: torch.Tensor) -> torch.Tensor:
        at = case.dim if t.shape in shapes else "R"
        return place(t.detach().clone(), mesh, (at,)).requires_grad_(t.requires_grad)

    def gradient(t: torch.Tensor) -> torch.Tensor:
        return place(_numbers(torch.empty(t.shape, dtype=t.dtype)), mesh, places_of(t))  # type: ignore[arg-type]

    gathers = Gathers()
    try:
        with convmesh.enable(), gathers:
            actual, gradients = _outputs(fn, sample, sharded, gradient)
    except convmesh.ShardingError as error:
        return "refused", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    try:
        for mine, dense in zip([*actual, *gradients], [*expected, *expected_gradients], strict=True):
            if mine is not None or dense is not None:
                whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
                assert_close(whole if whole is not None else torch.zeros_like(dense), _or_zeros(dense, whole))
    except Exception as error:
        return "wrong", f"{type(error).__name__}: {error}"
    activation = max((t.numel() for t in inputs), default=0)
    return ("gathered" if activation > mesh.size() and gathers.largest >= activation else "right"), ""


def _or_zeros(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if tensor is None else tensor


def load(mesh: DeviceMesh) -> None:
    """New processes take their time to import all samples, which is not to count against a case."""
    _operators()


def run(pool: Pool, chosen: list[Case], ranks: int) -> Iterator[tuple[Case, str, str]]:
    """Judge the cases in batches, and one by one where the ranks of a batch do not come to an end together."""
    for start in range(0, len(chosen), BATCH):
        batch = chosen[start : start + BATCH]
        pool.run(load, mesh=(ranks,))
        try:
            results = pool.run_cases(judge, batch, mesh=(ranks,), timeout=BATCH_SECONDS)
        except RankError:
            results = []
            for case in batch:
                pool.run(load, mesh=(ranks,))
                try:
                    results += pool.run_cases(judge, [case], mesh=(ranks,), timeout=ALONE_SECONDS)
                except RankError as error:
                    results.append([("error", str(error).splitlines()[0])])
        for case, by_rank in zip(batch, results, strict=True):
            yield case, by_rank[0][0], next((reason for _, reason in by_rank if reason), "")


def report(counts: dict[str, Counter[str]]) -> Table:
    table = Table("family", *VERDICTS, title="PyTorch's own samples, sharded on each dimension", title_justify="left")
    for family, count in counts.items():
        name = family if FAMILIES[family].ours else f"{family} (torch's)"
        table.add_row(name, *(str(count[verdict]) for verdict in VERDICTS))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=1000, help="samples of each operator")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="only this one; may be repeated")
    parser.add_argument("--show", action="append", default=[], choices=VERDICTS, help="list the cases of this verdict")
    options = parser.parse_args()
    chosen = {family: list(cases(family, options.most)) for family in options.family or FAMILIES}
    counts: dict[str, Counter[str]] = {family: Counter() for family in chosen}
    console = Console()
    with Pool() as pool, Progress(console=console) as progress:
        task = progress.add_task("conformance", total=sum(map(len, chosen.values())) * len(RANKS))
        for family, some in chosen.items():
            for ranks in RANKS:
                for case, verdict, reason in run(pool, some, ranks):
                    counts[family][verdict] += 1
                    progress.update(task, advance=1, description=family)
                    if verdict in options.show:
                        console.print(f"{verdict}: {case} over {ranks} ranks: {reason.strip()[:300]}", markup=False)
    console.print(report(counts))
    return 1 if any(count["wrong"] for family, count in counts.items() if FAMILIES[family].ours) else 0


if __name__ == "__main__":
    sys.exit(main())
