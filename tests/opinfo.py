"""PyTorch's own samples of operators (OpInfo), by the families of this library."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True)
class Family:
    """Operators by the names that OpInfo gives them."""

    operators: tuple[str, ...]
    alone: bool = False  # the other tensors of a sample are parameters: only the input is sharded
    elementwise: bool = False  # a result is made of a few values, to each of which it is compared by itself


def _functional(*names: str) -> tuple[str, ...]:
    return tuple(f"nn.functional.{name}" for name in names)


def _of_each(*stems: str) -> tuple[str, ...]:
    return _functional(*(f"{stem}{d}d" for stem in stems for d in (1, 2, 3)))


def _foreach(*names: str) -> tuple[str, ...]:
    return tuple(f"_foreach_{name}" for name in names)


# There are no samples of lp_pool, fold, affine_grid and the fused optimizers: the library's own tests have them. And
# rrelu draws other numbers in training than one device does, as the table of operators says. The samples of
# native_group_norm want gradients of its statistics, for which torch needs `unsqueeze_`, which DTensor does not have.
FAMILIES = {
    "convolution": Family(_of_each("conv", "conv_transpose"), alone=True),
    "pooling": Family(
        (*_of_each("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool"),
         "max_pool2d_with_indices_backward"),
    ),
    "normalisation": Family(
        _functional("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm", "local_response_norm",
                    "normalize") + ("native_batch_norm", "native_layer_norm"),
        alone=True,
    ),
    "resampling": Family(
        (*_functional("interpolate", "upsample_bilinear", "upsample_nearest", "pixel_shuffle", "pixel_unshuffle",
                      "grid_sample"),
         "_upsample_bilinear2d_aa", "grid_sampler_2d", "grid_sampler_3d"),
    ),
    "padding": Family((*_functional("pad"), "constant_pad_nd"), elementwise=True),
    "indexing": Family(
        ("select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "slice_scatter",
         "select_scatter", "stack", "cat", "hstack", "vstack", "flip", "fliplr", "flipud", "roll",
         "__getitem__", "index_select", "index_add", "gather", *_functional("unfold"), "tensor_split", "rot90",
         "scatter", "scatter_add", "take_along_dim", "index_put", "masked_select", "masked_scatter", "nonzero",
         "argwhere", "tril", "triu"),
        elementwise=True,
    ),
    "linear": Family(
        (*_functional("linear", "gelu", "prelu"), "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum",
         "flatten", "permute", "transpose", "softmax", "log_softmax"),
        alone=True,
    ),
    "attention": Family(_functional("scaled_dot_product_attention")),  # keys and values are cut as the queries are
    "losses": Family(
        _functional("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
                    "binary_cross_entropy_with_logits", "kl_div", "nll_loss", "cross_entropy", "soft_margin_loss",
                    "poisson_nll_loss"),
    ),
    "reductions": Family(
        ("sum", "mean", "var", "std", "var_mean", "std_mean", "amax", "amin", "max", "min", "argmax", "argmin", "norm",
         "linalg.vector_norm", "logsumexp", "prod", "cumsum", "cumprod", "sort", "argsort", "topk", "kthvalue",
         "median", "quantile", "any", "all", "histc"),
    ),
    "foreach": Family(
        _foreach("neg", "reciprocal", "sqrt", "rsqrt", "abs", "add", "sub", "mul", "div", "addcdiv", "addcmul", "pow",
                 "lerp", "norm", "max", "maximum", "minimum", "clamp_min", "clamp_max", "exp", "sign", "copy", "zero"),
        elementwise=True,
    ),
    "random": Family(
        (*_functional("dropout", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
         "normal", "bernoulli", "uniform", "exponential", "rand_like", "randn_like", "randint_like"),
        elementwise=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A sample of an operator, whose input is sharded on a dimension."""

    operator: str
    variant: str
    in_place: bool
    sample: int
    dim: int

    def __str__(self) -> str:
        name = f"{self.operator}{'_' if self.in_place else ''}{f' ({self.variant})' if self.variant else ''}"
        return f"{name}, sample {self.sample}, dimension {self.dim}"


@lru_cache(maxsize=1)
def operators() -> dict[str, list[Any]]:
    """All of PyTorch's samples, by the operator's name; of one operator there may be several kinds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as samples

    found: dict[str, list[Any]] = {}
    lists = [getattr(samples, f"foreach_{kind}_op_db") for kind in ("unary", "binary", "pointwise", "reduce", "other")]
    for info in [*samples.op_db, *(info for some in lists for info in some)]:
        found.setdefault(info.name, []).append(info)
    return found


@lru_cache(maxsize=4)
def samples_of(operator: str, variant: str, in_place: bool) -> tuple[Any, list[Any]]:
    """The operator, and all its samples; the same on every rank, since all start from one seed."""
    info = next(info for info in operators()[operator] if info.variant_test_name == variant)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if operator.startswith("_foreach"):
            function = info.inplace_variant if in_place else info.method_variant
            sizes = {"num_input_tensors": [3]}
            return function, list(info.sample_inputs("cpu", torch.float64, noncontiguous=False, **sizes))
        differentiable = bool(info.supports_autograd)
        return info.op, list(info.sample_inputs("cpu", torch.float64, requires_grad=differentiable))


def cases(family: str, most: int) -> Iterator[Case]:
    """At most `most` samples of each operator, spread over all that there are."""
    for operator in FAMILIES[family].operators:
        for info in operators()[operator]:
            foreach = operator.startswith("_foreach")
            ways = [way for way in (False, True) if _callable(info, foreach, way)]
            for in_place in ways:
                samples = samples_of(operator, info.variant_test_name, in_place)[1]
                for number in range(0, len(samples), max(1, -(-len(samples) // most))):
                    dims = max((t.dim() for t in tensors_of(samples[number].input)), default=0)
                    for dim in range(dims):
                        yield Case(operator, info.variant_test_name, in_place, number, dim)


def _callable(info: Any, foreach: bool, in_place: bool) -> bool:
    """Only the operators on lists are tried in place: of the others torch has samples that it must refuse then."""
    if not foreach:
        return not in_place
    return (info.inplace_variant if in_place else info.method_variant) is not None


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
