"""DTensor attributes and methods that torch's DTensor loses or refuses.

There, `tensor.data = other` silently changes nothing. A number in a format string is an error, and so are `tolist` and
`numpy` even of replicated tensors, and `copy.deepcopy` of a view. `torch.save` writes files that cannot be loaded
elsewhere.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate
from torch.utils._pytree import tree_iter

from .. import _torch
from ..comm import caller
from .errors import PlainTensor, refuse
from .layout import is_plain, is_sum
from .registry import unlisted, while_installed


def _get_data(tensor: DTensor) -> Any:
    return _torch.whole_data.__get__(tensor)


def _set_data(tensor: DTensor, value: torch.Tensor) -> None:
    """Set `data`: the wrapper takes over torch's state of the other tensor, its local tensor and its spec."""
    if not isinstance(value, DTensor):
        raise refuse("tensor.data = value", "the value is a plain torch.Tensor", [("tensor", tensor), ("value", value)],
                     "make it a DTensor: convmesh.shard(value, mesh, ...)", PlainTensor)  # fmt: skip
    _torch.whole_data.__set__(tensor, value)
    _torch.relocate(tensor, _torch.local_of(value), _torch.eager_spec_of(value))


def _format(tensor: DTensor, spec: str) -> str:
    """Format as any tensor with one element; a Partial(sum) is not known to a rank alone."""
    known = all(is_plain(placement) and not is_sum(placement) for placement in tensor.placements)
    return format(tensor.item(), spec) if tensor.dim() == 0 and known else object.__format__(tensor, spec)


def _tolist(tensor: DTensor) -> Any:
    return _plain_value(tensor, "tolist").tolist()


def _numpy(tensor: DTensor, *, force: bool = False) -> Any:
    return _plain_value(tensor, "numpy").numpy(force=force)


def _plain_value(tensor: DTensor, name: str) -> torch.Tensor:
    """Return a replicated tensor as a plain one.

    Others are refused and not all-gathered: such lines are often run by one rank only, to print.
    """
    if all(isinstance(placement, Replicate) for placement in tensor.placements):
        return tensor.to_local()
    raise refuse(name, "this rank has only a shard of it", [("tensor", tensor)],
                 f"tensor.full_tensor().{name}() on all ranks, or tensor.to_local().{name}() for the part")  # fmt: skip


PLAIN_STATE = (
    "convmesh.export(model, path) writes safetensors that anyone loads, and convmesh.full_state_dict(model) gives "
    "plain tensors to torch.save; call them on all ranks. To go on training: convmesh.save_checkpoint"
)


def _reduce(tensor: DTensor, protocol: Any) -> Any:
    """Warn in torch.save, which uses a protocol that copy and pickle do not use by default."""
    if protocol == torch.serialization.DEFAULT_PROTOCOL:
        where = caller()
        warnings.warn(
            "torch.save of a DTensor writes this rank's local tensor and its mesh, which only a job with this mesh can "
            f"load\n  remedy: {PLAIN_STATE}{f'{chr(10)}  at {where}' if where else ''}",
            stacklevel=2,
        )
    return torch.Tensor.__reduce_ex__(tensor, protocol)


def _storage(tensor: DTensor) -> None:
    """Refuse `storage`, which safetensors calls, among others."""
    raise refuse("storage", "a DTensor has no memory of its own", [("tensor", tensor)],
                 f"tensor.to_local() for this rank's part; for a model's state_dict() {PLAIN_STATE}")  # fmt: skip


def _as_subclass(tensor: DTensor, kind: type) -> Any:
    """Convert to a subclass, as MONAI does for its MetaTensor."""
    try:
        return torch.Tensor.as_subclass(tensor, kind)
    except RuntimeError as error:
        raise refuse(kind.__name__, f"a DTensor cannot be a {kind.__name__} as well", [("tensor", tensor)],
                     "for MONAI's transforms, metrics and losses monai.data.set_track_meta(False) before them; else "
                     "give tensor.full_tensor()") from error  # fmt: skip


@unlisted(torch.ops.aten._has_same_storage_numel.default)
def _no_forward_mode(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse forward-mode derivatives, which begin with this operator; torch's message would not say why."""
    raise refuse("jvp", "torch has no forward-mode derivatives of DTensors", [("input", args[0])],
                 "torch.autograd.functional.jvp, which goes backward twice; or torch.func.vjp, jacrev")  # fmt: skip


NO_DDP = (
    "do without DistributedDataParallel (accelerate.prepare makes one): convmesh.distribute(model, mesh) sums the "
    "gradients itself"
)


def _no_group_collective(operator: _torch.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse DistributedDataParallel, which begins with such a collective; torch's message would not say why."""
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    raise refuse(f"torch.distributed, {_torch.name_of(operator)}", "it sends plain tensors, no DTensors",
                 [(f"tensor {number}", tensor) for number, tensor in enumerate(tensors)],
                 f"around a distributed model {NO_DDP}; a metric of sharded tensors needs no gathering: "
                 "convmesh.distribute(metric, mesh), of torchmetrics or MONAI; else send tensor.to_local(), or let "
                 "tensor.redistribute(...) and tensor.full_tensor() send it")  # fmt: skip


for _collective in _torch.group_collectives():
    unlisted(_collective)(_no_group_collective)

while_installed(
    lambda: _torch.give_attributes(
        {
            "data": property(_get_data, _set_data), "__format__": _format, "tolist": _tolist, "numpy": _numpy,
            "__deepcopy__": _torch.deep_copy, "__reduce_ex__": _reduce, "storage": _storage,
            "as_subclass": _as_subclass,
        }
    )
)  # fmt: skip
