"""What the schema of an operator says, and calling it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table

from .names import Operator


def name_of(operator: Operator) -> str:
    """Without namespace and overload."""
    return operator._schema.name.partition("::")[2]


def arguments(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema."""
    defaults = _defaults(operator)
    if not kwargs:
        return args + tuple([default for _, default in defaults[len(args) :]])
    return args + tuple([kwargs.get(name, default) for name, default in defaults[len(args) :]])


@lru_cache(maxsize=4096)
def _defaults(operator: Operator) -> tuple[tuple[str, Any], ...]:
    return tuple((argument.name, argument.default_value) for argument in operator._schema.arguments)


@dataclass(frozen=True)
class Signature:
    """What the schema of an operator says about its arguments, by position."""

    names: tuple[str, ...]
    tensors: tuple[int, ...]
    lists: tuple[int, ...]
    places: tuple[int, ...]  # of tensors, and of lists of tensors that may lack some
    written: frozenset[int]
    by_name: int  # the arguments from here on are passed by name

    @property
    def has_out(self) -> bool:
        """It writes into tensors that are given by name, for its results."""
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
    """All of torch's own operators that Python can call."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if space == "aten" and operator is not None:
            found.append(operator)
    return tuple(found)


def group_collectives() -> tuple[Operator, ...]:
    """What `torch.distributed` itself calls with the tensors of `dist.all_reduce` and the like."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]
    return tuple(getattr(torch.ops.c10d, name.removeprefix("c10d::")).default for name in names if "." not in name)


@lru_cache(maxsize=1)
def writing_operators() -> tuple[Operator, ...]:
    """All of torch's own operators that write into an argument, as their names say: those without a name for it have
    rules of their own, or write what is no value."""
    return tuple(
        operator
        for operator in _all_operators()
        if operator._schema.is_mutable and (name_of(operator).endswith("_") or operator._schema.overload_name)
    )


@lru_cache(maxsize=1)
def composite_operators() -> tuple[Operator, ...]:
    """All of torch's own operators that are made of others, and not for a device's sake."""
    return tuple(operator for operator in _all_operators() if is_composite(operator))


@lru_cache(maxsize=1)
def view_operators() -> tuple[Operator, ...]:
    """All of torch's own operators whose result is a view."""
    return tuple(operator for operator in _all_operators() if operator._schema._is_view_op())


@lru_cache(maxsize=1)
def values_alone() -> tuple[Operator, ...]:
    """All of torch's own operators that make values of values: no views, nothing random, nothing that writes into what
    is given for its results, and in place only what is there as a function too."""
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
    """Of an operator that writes into its first argument, the one that returns a new tensor instead."""
    if signature(operator).written != {0} or not name_of(operator).endswith("_") or not gives_one_tensor(operator):
        return None
    packet = getattr(torch.ops.aten, name_of(operator)[:-1], None)
    return getattr(packet, operator._overloadname, None)


@lru_cache(maxsize=1)
def out_operators() -> tuple[Operator, ...]:
    """All of torch's own operators that write into what is given for their results, lists of tensors apart."""
    return tuple(o for o in _all_operators() if o._schema.is_mutable and o._schema.returns and signature(o).has_out)


@cache
def returning(operator: Operator) -> Operator | None:
    """Of an operator that writes into what is given for its results, the one that returns new tensors instead."""
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
    """What torch makes of an operator where a backend does not have it."""
    found: Callable[..., Any] | None = decomposition_table.get(operator)
    return found


def takes_tensors(operator: Operator) -> bool:
    """Not one of those on numbers, strings or lists, of which torch.jit has many."""
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return "Tensor" in kinds or kinds[:1] == ["List[Tensor]"]


def overloads(*names: str) -> list[Operator]:
    """Of operators by name, in place and not, those on tensors that do not write to an `out`."""
    packets = [getattr(torch.ops.aten, spelt, None) for name in names for spelt in (name, f"{name}_")]
    found = [getattr(packet, overload) for packet in packets if packet is not None for overload in packet.overloads()]
    return [operator for operator in found if takes_tensors(operator) and not signature(operator).has_out]


def takes_several(operator: Operator) -> bool:
    """More than one tensor."""
    kinds = [str(argument.type) for argument in operator._schema.arguments]
    return sum(kind in ("Tensor", "Optional[Tensor]") for kind in kinds) > 1


def gives_one_tensor(operator: Operator) -> bool:
    return [str(result.type) for result in operator._schema.returns] == ["Tensor"]


def is_composite(operator: Operator) -> bool:
    """Whether it is made of other operators before DTensor sees it, but in inference mode."""
    made, own = (
        torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
        for key in ("CompositeImplicitAutograd", "CPU")
    )
    return bool(made and not own)


def call(operator: Operator, values: Sequence[Any]) -> Any:
    """Call with all arguments in the order of the schema."""
    if signature(operator).by_name == len(values):
        return operator(*values)
    args, kwargs = by_name(operator, values)
    return operator(*args, **kwargs)


def by_name(operator: Operator, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments in the order of the schema as a call takes them: args and kwargs."""
    known = signature(operator)
    named = dict(zip(known.names[known.by_name :], values[known.by_name :], strict=True))
    return tuple(values[: known.by_name]), named


def autograd_keys(name: str) -> tuple[str, ...]:
    """Where a function has to be registered to stand in for an operator above autograd, for all kinds of tensors.

    What torch makes of other operators at once it prefers to anything that is registered for all backends alike. What
    it has for nested tensors stays for these.
    """
    special = ("CompositeImplicitAutograd", "NestedTensorCPU")
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in special):
        return ("Autograd",)
    return tuple(f"Autograd{backend}" for backend in ("CPU", "CUDA", "XPU", "HPU", "MPS", "PrivateUse1", "Meta"))


def composite(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch itself does for an operator that is made of others."""
    return operator.decompose(*args, **kwargs)
