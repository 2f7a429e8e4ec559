"""The arguments of operators on lists of tensors: the i-th tensors of all lists are brought to the same placements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ... import _torch
from ...sharding.assign import assign
from ...sharding.errors import refuse
from ...sharding.layout import Layout, is_sum
from ...sharding.partial import cached_sum, is_partial, reduce_once, write_sum_back
from ...sharding.plan_cache import planned
from ...sharding.redistribute import check_placed, move
from ...strides import Usual, format_of, has_idle_strides

LINEAR = frozenset(f"_foreach_{name}" for name in (
    "neg.default", "mul.Scalar", "div.Scalar", "mul.ScalarList", "div.ScalarList", "add.List", "sub.List",
))  # fmt: skip


class Known(NamedTuple):
    """Lists of tensors from an earlier call that needed no redistribution."""

    specs: list[list[_torch.Spec]]
    odd: list[tuple[int, int, Usual]]  # (list, index, how to restride it) of tensors with a local size of 0 or 1
    has_gaps: bool


# The most recent lists, by operator, number of tensors and thread (a thread may be a rank).
_known: dict[tuple[int, int, int], Known] = {}


def of_one_layout(
    operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], list[_torch.Spec], bool] | None:
    """Return all arguments with local tensors, the specs, and whether a tensor has gaps in its storage.

    None if something may have to be redistributed, which is rare.
    """
    values = list(_torch.arguments(operator, args, kwargs))
    lists = [number for number in _torch.signature(operator).lists if values[number]]
    given = [values[number] for number in lists]
    if len(set(map(len, given))) != 1 or True in [isinstance(value, DTensor) for value in values]:
        return None
    key = id(operator), len(given[0]), get_ident()
    found, opened = _known.get(key), _torch.opened_like(given)
    if found is None or opened is None or opened[1] != found.specs:
        if opened is not None:
            _torch.share_specs(given)
            opened = _torch.opened_like(given)
        checked = _torch.opened_lists(given, _is_settled)
        if checked is None:
            return None
        locals, specs = checked
        has_gaps = any(format_of(tuple(spec.shape), spec.stride) is None for spec in specs)
        if opened is not None:
            each = [(number, at, one) for number, some in enumerate(locals) for at, one in enumerate(some)]
            odd = [(number, at, Usual(specs[at].stride)) for number, at, one in each if has_idle_strides(one.shape)]
            _known[key] = Known(opened[1], odd, has_gaps)
    else:
        locals, (specs, *_), has_gaps = *opened, found.has_gaps
        for number, at, made_usual in found.odd:
            locals[number][at] = made_usual(locals[number][at])
    for number, local in zip(lists, locals, strict=True):
        values[number] = local
    return values, specs, has_gaps


class Lists:
    """The arguments of one call: what each rank computes with, and where results go.

    The i-th tensors of all lists have one layout when the operator runs. Partial tensors are reduced first, except for
    linear operators on sums that have not been reduced yet.
    """

    def __init__(self, operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any], reduce: bool = True):
        self.operator = operator
        self.values = list(_torch.arguments(operator, args, kwargs))
        self._known = _torch.signature(operator)
        self._lists = [number for number in self._known.lists if self.values[number]]
        self._check_lengths()
        self._reduced: dict[int, DTensor] = {}
        self._reduce = reduce and not self._term_by_term()
        assert self.targets is not None  # raises errors before anything is sent
        self._reduced = reduce_once(self._dtensors()) if self._reduce else {}

    @cached_property
    def targets(self) -> list[Layout | None]:
        """For each index into the lists, the layout that the tensors are brought to."""
        return [self._target(index) for index in range(len(self._first))]

    def local(self) -> list[Any]:
        """Return all arguments for calling the stock operator on local tensors."""
        local = [self._whole(value) for value in self.values]
        for number in self._lists:
            local[number] = [
                self._move(tensor, target) for tensor, target in zip(self.values[number], self.targets, strict=True)
            ]
        return local

    def write_back(self, local: Sequence[Any]) -> None:
        """Copy what the operator wrote into copies back to the tensors they were made from."""
        for number in self._known.written:
            if number not in self._lists:
                continue
            for tensor, result, target in zip(self.values[number], local[number], self.targets, strict=True):
                if not isinstance(tensor, DTensor) or target is None:
                    continue
                memory = _torch.memory_of(result)
                if memory != _torch.memory_of(_torch.local_of(tensor)):
                    sum = self._reduced.get(id(tensor))
                    if sum is not None and memory == _torch.memory_of(_torch.local_of(sum)):
                        write_sum_back(tensor, sum)
                    else:
                        assign(tensor, _torch.wrap(result, target.spec))

    def wrap(self, results: Sequence[torch.Tensor], number: int = 0) -> list[torch.Tensor]:
        """Return the DTensors of a list of results, which belong to the list argument `number`."""
        given = self.values[self._known.lists[number]]
        return [
            _torch.wrap(local, _with_dtype(target, local.dtype).spec)
            if isinstance(tensor, DTensor) and target is not None
            else local
            for local, tensor, target in zip(results, given, self.targets, strict=False)
        ]

    def _term_by_term(self) -> bool:
        """Whether every rank may compute on its own terms of Partial sums, with terms of the results as its output."""
        name = f"{_torch.name_of(self.operator).removesuffix('_')}.{self.operator._overloadname}"
        if name not in LINEAR or any(isinstance(value, torch.Tensor) for value in self.values):
            return False

        def alone(first: Any, *others: Any) -> bool:
            if not all(type(tensor) is DTensor for tensor in (first, *others)):
                return False
            alike = all((one.placements, one.shape) == (first.placements, first.shape) for one in others)
            summed = all(type(p) in (Replicate, Shard) or is_sum(p) for p in first.placements)
            known = is_partial(first) and any(cached_sum(tensor) is not None for tensor in (first, *others))
            return alike and summed and not known

        return all(alone(*together) for together in zip(*(self.values[n] for n in self._lists), strict=True))

    def _dtensors(self) -> list[DTensor]:
        given = [tensor for number in self._lists for tensor in self.values[number]]
        given += [value for value in self.values if isinstance(value, DTensor)]
        return [tensor for tensor in given if isinstance(tensor, DTensor)]

    @property
    def _first(self) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = self.values[self._lists[0]] if self._lists else ()
        return tensors

    def _check_lengths(self) -> None:
        lengths = [(self._known.names[number], len(self.values[number])) for number in self._lists]
        if len({length for _, length in lengths}) > 1:
            raise refuse(self.operator._schema.name, "the lists differ in length", lengths, "give lists of one length")

    def _target(self, index: int) -> Layout | None:
        """Return the layout for the tensors at `index`; None if they are plain tensors, which stay plain."""
        named = [(self._known.names[number], self.values[number][index]) for number in self._lists]
        tensors = [(name, tensor) for name, tensor in named if tensor.dim() > 0]
        if not any(isinstance(tensor, DTensor) for _, tensor in tensors):
            tensors = named if any(isinstance(tensor, DTensor) for _, tensor in named) else []
        if not tensors:
            return None
        check_placed(self.operator._schema.name, tensors)
        specs = (_torch.spec_of(tensor) for _, tensor in tensors)
        if not self._reduce:
            return Layout.of(next(specs))
        return _common(self.operator._schema.name, 0 in self._known.written, *specs)

    def _move(self, tensor: torch.Tensor, target: Layout | None) -> torch.Tensor:
        """Return the local tensor of `tensor` at the layout `target`."""
        tensor = self._reduced.get(id(tensor), tensor)
        if not isinstance(tensor, DTensor) or target is None:
            return tensor
        if tensor.dim() < len(target.shape):
            local: torch.Tensor = self._whole(tensor)
            return local
        if not target.present:
            return _torch.local_of(tensor)
        moved: torch.Tensor = move(tensor, target)
        return moved

    def _whole(self, value: Any) -> Any:
        """Return a tensor beside the lists, such as a learning rate, as a full local tensor: it applies to them all."""
        if not isinstance(value, DTensor):
            return value
        value = self._reduced.get(id(value), value)
        layout = Layout.of(_torch.spec_of(value))
        return move(value, layout.placed((Replicate(),) * layout.mesh.ndim))


def _is_settled(spec: _torch.Spec) -> bool:
    return _settled(spec.placements, spec.shard_order)


@lru_cache(maxsize=1024)
def _settled(placements: tuple[Placement, ...], shard_order: object) -> bool:
    """Whether there is no Partial, only Replicate and Shard in the mesh's order."""
    return all(type(placement) in (Replicate, Shard) for placement in placements) and _torch.plain(shard_order)


@planned
def _common(operator: str, in_place: bool, *specs: _torch.Spec) -> Layout:
    """Return the layout for the tensors at one index.

    It is that of the first tensor if it is written in place, else that of any sharded one, so that none is gathered.
    """
    layouts = [Layout.of(spec) for spec in specs]
    first = layouts[0]
    for layout in layouts[1:]:
        if layout.shape != first.shape:
            raise refuse(
                operator, "two lists have tensors of different shapes at the same index",
                (("one", first), ("the other", layout)), "expand them to one shape, or use the operator on one tensor",
            )  # fmt: skip
    if in_place:
        layouts = layouts[:1]
    placements: list[Placement] = []
    for mesh_dim in range(first.mesh.ndim):
        candidates = [layout.placements[mesh_dim] for layout in layouts]
        sharded = [placement for placement in candidates if isinstance(placement, Shard)]
        placements.append(sharded[0] if sharded else Replicate())
    return first.placed(tuple(placements))


@planned
def _with_dtype(layout: Layout, dtype: torch.dtype) -> Layout:
    return layout.typed(dtype)
