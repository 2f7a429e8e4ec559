"""Reductions and all-gathers of small results over ranks.

Only what is left of a tensor after a local reduction comes here: values per channel, per row, or a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan
from threading import local

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch
from .shared_memory.mailbox import mailbox_of

# gloo reduces in several rounds, each of which wakes threads on all ranks. One all-to-all takes half the time as long
# as latency dominates (measured with 2 and 4 ranks): up to FEW_BYTES from all ranks together, or FEW_SHARED_BYTES if
# they share memory.
FEW_BYTES, FEW_SHARED_BYTES = 2**16, 2**20
# Integer types that backends do not reduce. Sums that overflow wrap around when they are cast back.
WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
COMBINE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum, "max": torch.amax, "min": torch.amin,
}  # fmt: skip
_merging = local()  # `.on` while this thread does an all-gather in place of a reduction


def all_reduce(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum") -> torch.Tensor:
    """Return `tensor` reduced over all ranks along `mesh_dims`, on each of them; `op` is sum, max or min."""
    return start_reducing(tensor, mesh, mesh_dims, op)()


def start_reducing(
    tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: Sequence[int], op: str = "sum"
) -> Callable[[], torch.Tensor]:
    """Start to reduce `tensor` over all ranks along `mesh_dims`; return a function that waits for the result."""
    groups = groups_along(mesh, mesh_dims)
    if not groups:
        return lambda: tensor
    first = _start(tensor, groups[0], op)

    def finish() -> torch.Tensor:
        result = first()
        for group in groups[1:]:
            result = _start(result, group, op)()
        return result

    return finish


def _start(tensor: torch.Tensor, group: dist.ProcessGroup, op: str) -> Callable[[], torch.Tensor]:
    if _goes_at_once(tensor, group):
        everybody = _tell_all(tensor, group)
        return lambda: COMBINE[op](everybody(), 0)
    if op != "sum" and tensor.is_floating_point():
        return _start_extreme(tensor, group, op)
    wider = WIDER.get(tensor.dtype, tensor.dtype)
    under_way = _torch.all_reduce(tensor.to(wider).contiguous(), op, group)
    return lambda: _torch.wait(under_way).to(tensor.dtype)


def _start_extreme(tensor: torch.Tensor, group: dist.ProcessGroup, op: str) -> Callable[[], torch.Tensor]:
    """Reduce max or min so that NaNs propagate, as torch's do: backends drop NaNs, so flags for them are sent too."""
    missing = tensor.isnan()
    flags = missing.to(tensor.dtype) * (-1 if op == "min" else 1)
    numbers = tensor.masked_fill(missing, inf if op == "min" else -inf)
    under_way = _torch.all_reduce(torch.stack([numbers, flags]), op, group)

    def finish() -> torch.Tensor:
        value, flag = _torch.wait(under_way).unbind()
        return value.masked_fill(flag != 0, nan)

    return finish


def sum_over(tensor: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """The sum over the ranks of `groups_along`, of numbers that backends add up; it may be where `tensor` was."""
    for group in groups:
        tensor = _tell_all(tensor, group)().sum(0) if _goes_at_once(tensor, group) else _torch.sum_up(tensor, group)
    return tensor


def _goes_at_once(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether an all-gather replaces the all-reduce: each rank then reduces all tensors itself, in the same order."""
    if not _torch.is_gloo(group) or not tensor.is_cpu or _torch.tracing():
        return False
    size = tensor.numel() * tensor.element_size() * group.size()
    if size > FEW_SHARED_BYTES:
        return False
    return size <= FEW_BYTES or mailbox_of(group) is not None


def _tell_all(tensor: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start an all-gather; return a function that waits for `[rank, *tensor.shape]`."""
    ranks, count = group.size(), tensor.numel()
    messages = tensor.reshape(1, count).expand(ranks, count).reshape(-1)
    arriving = _torch.all_to_all(messages, [count] * ranks, [count] * ranks, group)
    return lambda: _torch.wait(arriving).view(ranks, *tensor.shape)


def groups_along(mesh: DeviceMesh, mesh_dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """Return the groups over which to reduce one after the other: the world, if all of its mesh dimensions take part.

    A group for other sets of mesh dimensions would have to be created by ranks that may not take part in the call.
    """
    mesh_dims = [mesh_dim for mesh_dim in mesh_dims if mesh.size(mesh_dim) > 1]
    world = dist.group.WORLD
    if len(mesh_dims) > 1 and world is not None and mesh.size() == world.size():
        every = all(mesh.size(mesh_dim) == 1 for mesh_dim in range(mesh.ndim) if mesh_dim not in mesh_dims)
        if every:
            return [world]
    return [mesh.get_group(mesh_dim) for mesh_dim in mesh_dims]


def all_gather_stacked(tensor: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> torch.Tensor:
    """Return the tensors of all ranks along `mesh_dims`, stacked in rank order, the first mesh dimension outermost."""
    return all_gather_rows(tensor.contiguous().view(1, *tensor.shape), mesh, mesh_dims)


def all_gather_summaries(rows: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """`all_gather_rows` over `groups`, of summaries that each rank then combines, in place of an all-reduce."""
    _merging.on = True
    try:
        return _gather_rows(rows, groups)
    finally:
        _merging.on = False


def replaces_reduction() -> bool:
    """Whether an all-gather that starts now comes from `all_gather_summaries`: it gathers no shards of a tensor."""
    return getattr(_merging, "on", False)


def all_gather_rows(rows: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> torch.Tensor:
    """All-gather contiguous rows, as many on each rank, and concatenate them in rank order."""
    return _gather_rows(rows, lines_along(mesh, mesh_dims))


def lines_along(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> list[dist.ProcessGroup]:
    """Return the groups over which to gather, one after the other."""
    return [mesh.get_group(mesh_dim) for mesh_dim in reversed(mesh_dims)]


def _gather_rows(rows: torch.Tensor, groups: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    for group in groups:
        if _goes_at_once(rows, group):
            rows = _tell_all(rows, group)().flatten(0, 1)
        elif rows.numel():  # some backends refuse empty tensors
            rows = _torch.gather(rows, group)
        else:
            rows = rows.repeat(group.size(), *[1] * (rows.dim() - 1))
    return rows


def are_few(tensor: torch.Tensor, ranks: int) -> bool:
    """Whether latency dominates when each of `ranks` ranks sends such a tensor to every other.

    The answer is the same on all ranks. It is False for symbolic sizes, which may be large.
    """
    size = tensor.numel() * tensor.element_size() * ranks
    return isinstance(size, int) and size <= FEW_BYTES
