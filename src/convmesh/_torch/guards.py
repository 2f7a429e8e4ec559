"""Guards of compiled code: what torch.compile checks before it runs again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch._dynamo.guards import GuardBuilder, convert_to_concrete_values
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .dispatch import replicates_implicitly


def guard_what_rules_know() -> Callable[[], None]:
    """Guard compiled code on the global sizes and strides, and on implicit replication, that it was compiled for.

    Returns a function that undoes this. torch.compile guards placements and local tensor only: over two ranks, 7 rows
    and 8 leave the first rank the same local tensor. A size that was a symbol at first may have become a number for
    good.
    """
    before = GuardBuilder.DTENSOR_SPEC_MATCH

    @wraps(before)
    def match(builder: Any, guard: Any) -> None:
        before(builder, guard)
        known = builder.check_fn_manager.output_graph.input_source_to_sizes_strides
        traced = known.get(guard.originating_source.base)
        if traced is None:
            return
        sizes, strides = (convert_to_concrete_values(traced[name]) for name in ("size", "stride"))
        implicitly = replicates_implicitly()
        says = f"global size={sizes}, stride={strides}, plain tensors replicated={implicitly}"
        fits = _fits(sizes, strides, implicitly)
        builder.get_guard_manager(guard).add_lambda_guard(fits, [says], guard.user_stack)

    _set(match)

    def undo() -> None:
        if GuardBuilder.DTENSOR_SPEC_MATCH is match:
            _set(before)

    return undo


def _set(match: Callable[[Any, Any], None]) -> None:
    GuardBuilder.DTENSOR_SPEC_MATCH = match  # type: ignore[method-assign]


def _fits(
    sizes: Sequence[int | None], strides: Sequence[int | None], implicitly: bool
) -> Callable[[DTensorSpec], bool]:
    """Return the check of a guard; None stands for a symbolic size or stride, which has guards of its own."""

    def same(actual: Sequence[int], expected: Sequence[int | None]) -> bool:
        return len(actual) == len(expected) and all(b is None or a == b for a, b in zip(actual, expected, strict=True))

    def fits(spec: DTensorSpec) -> bool:
        meta = spec.tensor_meta
        if replicates_implicitly() != implicitly:
            return False
        return meta is not None and same(meta.shape, sizes) and same(meta.stride, strides)

    return fits
