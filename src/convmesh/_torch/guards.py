"""When compiled code may run again: what torch.compile looks at before it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch._dynamo.guards import GuardBuilder, convert_to_concrete_values
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def guard_global_sizes() -> Callable[[], None]:
    """Let compiled code run only for the global sizes and strides that it was compiled for; returns what undoes that.

    torch.compile guards the placements and the local tensor. Over two ranks 7 rows and 8 leave the first rank the same
    local tensor, and a size that was a symbol at first may have become a number for good.
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
        says = f"global size={sizes}, stride={strides}"
        builder.get_guard_manager(guard).add_lambda_guard(_fits(sizes, strides), [says], guard.user_stack)

    GuardBuilder.DTENSOR_SPEC_MATCH = match

    def undo() -> None:
        if GuardBuilder.DTENSOR_SPEC_MATCH is match:
            GuardBuilder.DTENSOR_SPEC_MATCH = before

    return undo


def _fits(sizes: Sequence[int | None], strides: Sequence[int | None]) -> Callable[[DTensorSpec], bool]:
    """None stands for a size or stride that is a symbol, which has guards of its own."""

    def same(actual: Sequence[int], expected: Sequence[int | None]) -> bool:
        return len(actual) == len(expected) and all(b is None or a == b for a, b in zip(actual, expected, strict=True))

    def fits(spec: DTensorSpec) -> bool:
        meta = spec.tensor_meta
        return meta is not None and same(meta.shape, sizes) and same(meta.stride, strides)

    return fits
