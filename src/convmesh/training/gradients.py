"""Gradients that are summed over the ranks while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate
from torch.utils.hooks import unserializable_hook

from .. import _torch
from ..comm import Summation, Term
from ..sharding.layout import Layout, is_sum
from ..sharding.plan_cache import planned

_WATCHED = "_convmesh_watched"


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Those whose gradients nobody else looks after: FSDP reduces the ones that it has sharded, also over our mesh."""
    # In one go: before every forward pass, where torch's generators would take as long as the operators of a layer.
    parts = dict.fromkeys([module])
    for part in (todo := [module]):
        for child in part._modules.values():
            if child is not None and child not in parts:
                parts[child] = None
                todo.append(child)
    found = {id(one): one for part in parts for one in part._parameters.values() if one is not None}
    for part in parts:
        if isinstance(part, FSDPModule):
            for parameter in part.parameters():
                found.pop(id(parameter), None)
    return list(found.values())


class Gradients:
    """Watches parameters: a gradient that comes out of backward as a Partial(sum) joins a bucket, and a full bucket
    leaves at once, with which the memory of its gradients is free. At the end of backward every gradient lies where its
    parameter does.

    As long as it is `paused`, gradients stay Partial, and add up locally.
    """

    def __init__(self, bucket_bytes: int):
        self.bucket_bytes = bucket_bytes
        self.paused = False
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy belongs to a copy of the model, and watches nothing yet."""
        return Gradients, (self.bucket_bytes,)

    def watch(self, parameters: Sequence[torch.Tensor]) -> None:
        """Also those that are frozen now, and may be unfrozen. Before a forward pass, so nothing is under way.

        A parameter is known by its hook and a mark, not by a weak reference, with which torch could not convert it
        (`model.double()`): that takes the mark away, and the effect of hooks, which stay in its list.
        """
        if self._waiting and not _torch.in_backward():
            self._forget()  # an earlier backward pass has failed
        for parameter in parameters:
            if not isinstance(parameter, DTensor):
                continue  # such as what a transform of torch.func has around one
            if not parameter.is_leaf or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            if self._after not in _torch.gradient_hooks(parameter):
                trained = parameter.requires_grad
                parameter.requires_grad_()  # only then it takes hooks, and it keeps them
                parameter.register_hook(_before)
                parameter.register_post_accumulate_grad_hook(self._after)
                parameter.requires_grad_(trained)
            elif _WATCHED not in vars(parameter):
                _torch.attach_hooks(parameter, parameter)
            vars(parameter)[_WATCHED] = True

    def _forget(self) -> None:
        self._summation = Summation(self.bucket_bytes)
        self._waiting: dict[int, tuple[torch.Tensor, DTensor, int | None, _Way]] = {}

    def _after(self, parameter: torch.Tensor) -> None:
        """A gradient has arrived. One that arrives again, from a nested backward pass, counts as it is then."""
        gradient = parameter.grad
        if self.paused or not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            return
        way = _way(_torch.spec_of(gradient), _torch.spec_of(parameter))
        if way.arrived:
            return
        if torch.is_grad_enabled():  # create_graph: the sum has to be differentiable, too
            parameter.grad = gradient.redistribute(placements=parameter.placements)
            return
        if not self._waiting:
            _torch.when_backward_ends(self._finish)

        def left(total: torch.Tensor) -> None:
            if parameter.grad is gradient:
                parameter.grad = _torch.wrap(total, way.summed)

        term = Term(_torch.local_of(gradient), way.summed.mesh, way.sums, left) if way.sums else None
        number = None if term is None else self._summation.add(term)
        self._waiting[id(parameter)] = parameter, gradient, number, way

    def _finish(self) -> None:
        waiting, summation = list(self._waiting.values()), self._summation
        self._forget()
        sums = summation.finish()
        for parameter, before, number, way in waiting:
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue  # someone has taken the gradient, an optimizer that steps during backward for example
            if gradient is not before:
                way = _way(_torch.spec_of(gradient), _torch.spec_of(parameter))
            parameter.grad = _settled(parameter, _torch.local_of(gradient) if number is None else sums[number], way)


def _settled(parameter: DTensor, local: torch.Tensor, way: _Way) -> DTensor:
    """The gradient, of which `local` is summed, where the parameter lies and in its memory format."""
    if way.moved is not None:
        local = _torch.redistribute(local, way.summed, way.moved)
    if way.dense and local.is_contiguous():
        return _torch.new_dtensor(DTensor, local, way.wanted, requires_grad=False)  # nearly always
    beside = _torch.local_of(parameter)
    if local.stride() != beside.stride():
        local = torch.empty_like(beside, dtype=local.dtype).copy_(local)
    return _torch.wrap(local, way.wanted)


class _Way(NamedTuple):
    """From where backward leaves a gradient to where its parameter is."""

    arrived: bool  # is there already
    sums: tuple[int, ...]  # the mesh dimensions over which it is a Partial(sum)
    summed: _torch.Spec  # without these
    moved: _torch.Spec | None  # where the parameter is, if that is elsewhere
    wanted: _torch.Spec  # and in its strides
    dense: bool  # which are those of a new tensor, and of no number


@planned
def _way(gradient: _torch.Spec, parameter: _torch.Spec) -> _Way:
    """Other pending results (averages, extremes) are for a redistribution."""
    layout, goal = Layout.of(gradient), Layout.of(parameter)
    sums = tuple(mesh_dim for mesh_dim, placement in enumerate(layout.placements) if is_sum(placement))
    summed = layout.placed(tuple(Replicate() if is_sum(p) else p for p in layout.placements))
    moved = None if summed.placements == goal.placements else summed.placed(goal.placements).spec
    dense = goal.is_contiguous and bool(goal.shape)
    arrived = layout.placements == goal.placements
    return _Way(arrived, sums, summed.spec, moved, goal.typed(layout.dtype).spec, dense)


def _before(gradient: torch.Tensor) -> None:
    """Before a gradient is added to an earlier one: if only the new one is a Partial(sum), the earlier one becomes one.

    Else autograd would reduce the new one at once, by itself. The first rank has all of the earlier gradient then, and
    the others nothing.
    """
    parameter = _torch.accumulating()
    earlier = None if parameter is None else parameter.grad
    if parameter is None or not isinstance(earlier, DTensor) or not isinstance(gradient, DTensor):
        return
    placements = list(earlier.placements)
    local, mesh = _torch.local_of(earlier), earlier.device_mesh
    for mesh_dim, (old, new) in enumerate(zip(earlier.placements, gradient.placements, strict=True)):
        if is_sum(new) and isinstance(old, Replicate):
            placements[mesh_dim] = Partial()
            first = mesh.get_coordinate() is None or mesh.get_local_rank(mesh_dim) == 0
            local = local if first else torch.zeros_like(local)
    if placements != list(earlier.placements) and not torch.is_grad_enabled():
        parameter.grad = _torch.wrap(local, Layout.of(_torch.spec_of(earlier)).placed(tuple(placements)).spec)


unserializable_hook(_before)  # a model that is saved and loaded gets it anew when it is called
