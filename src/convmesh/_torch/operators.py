"""Properties of operators by their schema, and calling them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table

from .names import Operator


def name_of(operator: Operator) -> str:
    """Return an operator's name without namespace and overload."""
    return operator._schema.name.partition("::")[2]


def arguments(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return all arguments of a call in the order of the operator's schema."""
    defaults = _defaults(operator)
    if not kwargs:
        return args + tuple([default for _, default in defaults[len(args) :]])
    return args + tuple([kwargs.get(name, default) for name, default in defaults[len(args) :]])


@lru_cache(maxsize=4096)
def _defaults(operator: Operator) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


@dataclass(frozen=True)
class Signature:
    """The arguments of an operator, by position, according to its schema."""

    names: tuple[str, ...]
    tensors: tuple[int, ...]
    lists: tuple[int, ...]
    places: tuple[int, ...]  # of tensors, and of lists of tensors, which may contain None
    written: frozenset[int]
    by_name: int  # arguments from here on are keyword-only

    @property
    def has_out(self) -> bool:
        """Whether it writes its results into tensors passed by keyword (`out=`)."""
        return any(number >= self.by_name for number in self.written)


@cache
def signature(operator: Operator) -> Signature:
    schema = operator._schema.arguments

    def of_type(*types: str) -> tuple[int, ...]:
        return tuple(number for number, argument in enumerate(schema) if str(argument.type) in types)

    tensors, lists = ("Tensor", "Optional[Tensor]"), ("List[Tensor]", "List[Optional[Tensor]]")
    return Signature(
        tuple(argument.name for argument in schema),
        of_type(*tensors),
        of_type(lists[0]),
        of_type(*tensors, *lists),
        frozenset(number for number, argument in enumerate(schema) if argument.alias_info and argument.is_write),
        next((number for number, argument in enumerate(schema) if argument.kwarg_only), len(schema)),
    )


@lru_cache(maxsize=1)
def _all_operators() -> tuple[Operator, ...]:
    """Return all aten operators that Python can call."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if space == "aten" and operator is not None:
            found.append(operator)
    return tuple(found)


def group_collectives() -> tuple[Operator, ...]:
    """Return the operators behind `dist.all_reduce` and the other collectives of `torch.distributed`."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    return tuple(getattr(torch.ops.c10d, name.removeprefix("c10d::")).default for name in names if "." not in name)


@lru_cache(maxsize=1)
def writing_operators() -> tuple[Operator, ...]:
    """Return all aten operators that write into an argument, judging by their names.

    Those whose names do not say it have rules of their own, or write something other than values.
    """
    return tuple(
        operator
        for operator in _all_operators()
        if operator._schema.is_mutable and (name_of(operator).endswith("_") or operator._schema.overload_name)
    )


@lru_cache(maxsize=1)
def composite_operators() -> tuple[Operator, ...]:
    """Return all aten operators that are composites on every device."""
    return tuple(operator for operator in _all_operators() if is_composite(operator))


@lru_cache(maxsize=1)
def view_operators() -> tuple[Operator, ...]:
    """Return all aten operators whose result is a view."""
    return tuple(operator for operator in _all_operators() if operator._schema._is_view_op())


@lru_cache(maxsize=1)
def values_alone() -> tuple[Operator, ...]:
    """Return all aten operators that compute values from values: no views, no random ones, none with `out=`.

    In-place operators are included if they have a functional variant.
    """
    return tuple(
        operator
        for operator in _all_operators()
        if takes_tensors(operator)
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and not operator._schema._is_view_op()
        and not is_composite(operator)
        and (not operator._schema.is_mutable or functional_of(operator) is not None)
    )


@cache
def functional_of(operator: Operator) -> Operator | None:
    """Return the functional variant of an operator that writes into its first argument, or None."""
    if signature(operator).written != {0} or not name_of(operator).endswith("_") or not gives_one_tensor(operator):
        return None
    packet = getattr(torch.ops.aten, name_of(operator)[:-1], None)
    return getattr(packet, operator._overloadname, None)


@lru_cache(maxsize=1)
def out_operators() -> tuple[Operator, ...]:
    """Return all aten operators with `out=` tensors; lists of tensors do not count."""
    return tuple(o for o in _all_operators() if o._schema.is_mutable and o._schema.returns and signature(o).has_out)


@cache
def returning(operator: Operator) -> Operator | None:
    """Return the variant without `out=` of an operator with it, or None."""
    known, given = signature(operator), operator._schema.arguments
    others = [(argument.name, str(argument.type)) for n, argument in enumerate(given) if n not in known.written]
    packet = getattr(torch.ops.aten, name_of(operator))
    for candidate in (getattr(packet, overload) for overload in packet.overloads()):
        named = [(argument.name, str(argument.type)) for argument in candidate._schema.arguments]
        returned = len(candidate._schema.returns) == len(operator._schema.returns)
        if named == others and returned and not candidate._schema.is_mutable:
            return candidate  # type: ignore[no-any-return]
    return None


def decomposition(operator: Operator) -> Callable[..., Any] | None:
    """Return torch's decomposition of an operator for backends that lack it, or None."""
    found: Callable[..., Any] | None = decomposition_table.get(operator)
    return found


def takes_tensors(operator: Operator) -> bool:
    """Whether an operator takes tensors; torch.jit has many on numbers, strings or lists."""
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return "Tensor" in kinds or kinds[:1] == ["List[Tensor]"]


def overloads(*names: str) -> list[Operator]:
    """Return the overloads on tensors without `out=` of operators by name, including in-place variants."""
    packets = [getattr(torch.ops.aten, spelt, None) for name in names for spelt in (name, f"{name}_")]
    found = [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
    return [operator for operator in found if takes_tensors(operator) and not signature(operator).has_out]


def takes_several(operator: Operator) -> bool:
    """Whether an operator takes more than one tensor."""
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return sum(kind in ("Tensor", "Optional[Tensor]") for kind in kinds) > 1


def gives_one_tensor(operator: Operator) -> bool:
    return [str(result.type) for result in operator._schema.returns] == ["Tensor"]


def is_composite(operator: Operator) -> bool:
    """Whether an operator is decomposed before DTensor sees it, except in inference mode."""
    made, own = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("CompositeImplicitAutograd", "CPU")
    )
    return bool(made and not own)


def call(operator: Operator, values: Sequence[Any]) -> Any:
    """Call an operator with all arguments in the order of its schema."""
    if signature(operator).by_name == len(values):
        return operator(*values)
    args, kwargs = by_name(operator, values)
    return operator(*args, **kwargs)


def by_name(operator: Operator, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split all arguments, in the order of the schema, into args and kwargs of a call."""
    known = signature(operator)
    named = dict(zip(known.names[known.by_name :], values[known.by_name :], strict=True))
    return tuple(values[: known.by_name]), named


def autograd_keys(name: str) -> tuple[str, ...]:
    """Return the dispatch keys under which a function must be registered to replace an operator above autograd.

    For operators that torch decomposes, or that have nested tensor kernels, these are the keys of the single backends:
    torch prefers a decomposition to what is registered for all backends alike. Nested tensors keep torch's kernels.
    """
    special = ("CompositeImplicitAutograd", "NestedTensorCPU")
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in special):
        return ("Autograd",)
    return tuple(f"Autograd{backend}" for backend in ("CPU", "CUDA", "XPU", "HPU", "MPS", "PrivateUse1", "Meta"))


def composite(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run torch's decomposition of a composite operator."""
    return operator.decompose(*args, **kwargs)
