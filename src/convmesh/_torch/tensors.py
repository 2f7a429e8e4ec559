"""What is inside of a DTensor: this rank's part, where the parts lie, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ..strides import is_usual, usual
from .arrivals import memory_of
from .collectives import arrived
from .order import in_order
from .symbols import known
from .tracing import compile_for_this_rank, in_a_trace, no_modes, tracing

_slot: Any = DTensor.__dict__["_local_tensor"]


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, without recording the access for autograd as `to_local` does; fit for any kernel."""
    meta: Any = tensor._spec.tensor_meta
    local = arrived(tensor._local_tensor)
    if type(local) is torch.Tensor:
        return usual(local, meta.stride)
    numbers = all(type(number) is int for number in (*local.shape, *local.stride(), *meta.stride))
    if numbers and is_usual(tuple(local.shape), local.stride(), meta.stride):
        return local
    for dim in range(local.dim()):  # a compiler takes no writes through as_strided
        local = local.squeeze(dim).unsqueeze(dim) if type(local.shape[dim]) is int and local.shape[dim] == 1 else local
    return local


def plain_local_of(tensor: Any) -> torch.Tensor | None:
    """The local tensor of a DTensor by strides that any kernel takes, outside of a trace and where nothing is under
    way; None for what needs a closer look."""
    local = tensor._local_tensor if type(tensor) is DTensor else None
    return usual(local, tensor._spec.tensor_meta.stride) if type(local) is torch.Tensor else None


def slot_of(tensor: DTensor) -> Any:
    """The local tensor as it is, whoever watches (`before_local_tensors`)."""
    return _slot.__get__(tensor)


def noted(tensor: Any, name: str) -> Any:
    """What was noted at this rank's memory, None for nothing. None also beside a collective."""
    return notes_of(slot_of(tensor), name) if isinstance(tensor, DTensor) else None


def notes_of(local: Any, name: str) -> Any:
    return getattr(local.untyped_storage(), name, None) if takes_notes(local) else None


def before_local_tensors(prepare: Callable[[Any], None]) -> Callable[[], None]:
    """Have `prepare` called with a DTensor's local tensor before anything gets it, be it an operator, `to_local`,
    `full_tensor`, `redistribute` or compiled code; returns what ends it."""

    def get(tensor: DTensor) -> Any:
        local = _slot.__get__(tensor)
        prepare(local)
        return local

    DTensor._local_tensor = property(get, _slot.__set__)  # type: ignore[assignment]

    def end() -> None:
        DTensor._local_tensor = _slot

    return end


def takes_notes(local: Any) -> bool:
    """Whether something can be noted at this memory: a tensor's own, or a compiler's idea of one."""
    return type(local) is torch.Tensor or (isinstance(local, FakeTensor | FunctionalTensor) and in_a_trace())


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Where the tensor's parts lie: hashable, and so the key by which plans are cached."""
    spec: DTensorSpec = tensor._spec
    # The first test spares the second, which is slow, in nearly all calls.
    if type(tensor._local_tensor) is torch.Tensor or not tracing():
        return spec
    compile_for_this_rank()
    return _settled(spec)


def eager_spec_of(tensor: DTensor) -> DTensorSpec:
    """The same where nothing is traced, which takes longer to find out than a short rule may take."""
    spec: DTensorSpec = tensor._spec
    return spec


def _settled(spec: DTensorSpec) -> DTensorSpec:
    """With numbers where symbolic sizes have become numbers."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor's spec knows its shape"
    shape, stride = tuple(map(known, meta.shape)), tuple(map(known, meta.stride))
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(torch.Size(shape), stride, meta.dtype))


def plain_order(spec: DTensorSpec) -> bool:
    """A dimension sharded over several mesh dimensions is sharded over the first of them first."""
    strided = any(isinstance(placement, _StridedShard) for placement in spec.placements)
    return not strided and plain(spec.shard_order)


def plain(shard_order: Any) -> bool:
    return DTensorSpec.is_default_device_order(shard_order)


def in_rank_order(mesh: DeviceMesh) -> bool:
    """Ranks ascend along every mesh dimension. A process group sorts its ranks, so else its order is not the mesh's."""
    with no_modes():  # the mesh's own numbers are real, also while torch.compile traces
        ranks = mesh.mesh
        return all(bool((ranks.diff(dim=dim) > 0).all()) for dim in range(ranks.dim()))


def is_one_rank(mesh: DeviceMesh) -> bool:
    """This thread is one rank, or none, of the mesh. In torch's LocalTensorMode it plays all of them, and a number of
    a rank's own is a symbol that stands for the numbers of all."""
    return all(isinstance(at, int) for at in mesh.get_coordinate() or ())


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


# Past __init__, which does nothing but keep torch.compile out, and takes as long as the rest. Of a tensor without gaps
# and overlaps, which is no number, this is all of `wrap`.
new_dtensor: Callable[..., DTensor] = DTensor.__new__


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor below autograd, where the public constructor would record itself."""
    if 0 in local.stride():
        local = _without_overlap(local, spec)
    meta = spec.tensor_meta
    if meta is not None and not meta.shape and local.dim():
        local = local.new_zeros(())  # what DTensor gives a rank outside of the mesh in place of a number
    return new_dtensor(DTensor, local, spec, requires_grad=False)


def _without_overlap(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A local tensor whose elements share memory, as in an expanded tensor, only where the full tensor's do."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor's spec knows its shape"
    given = zip(local.shape, local.stride(), meta.stride, strict=False)
    overlaps = any(size > 1 and not step and whole for size, step, whole in given)
    # Without elements nothing overlaps, and a view has to stay one on every rank: writes are counted by its memory.
    return local.clone() if overlaps and local.numel() else local


def relocate(tensor: DTensor, local: torch.Tensor, spec: DTensorSpec) -> None:
    """Let a DTensor hold the same values in another placement from now on, whoever refers to it."""
    tensor._local_tensor, tensor._spec = local, spec


def deep_copy(tensor: DTensor, memo: dict[int, Any]) -> Any:
    """For `copy.deepcopy`. torch knows a wrapper by its address 0, to which it adds where in a storage this rank's part
    begins: a part of a larger memory, as gradients are that were summed in buckets, it takes for memory of its own."""
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # refuses
    if id(tensor) not in memo:
        copied = wrap(local_of(tensor).detach().clone(), tensor._spec).requires_grad_(tensor.requires_grad)
        if not isinstance(tensor, torch.nn.Parameter):  # the copy of a parameter has no gradient, on one device either
            copied.grad = deepcopy(tensor.grad, memo)
        vars(copied).update(deepcopy(vars(tensor), memo))
        memo[id(tensor)] = copied
    return memo[id(tensor)]


def version_of(local: torch.Tensor) -> int:
    """How often a tensor or a view of it was written; what is made in inference mode does not say."""
    return 0 if local.is_inference() else int(local._version)


def redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    def move(local: torch.Tensor) -> torch.Tensor:
        # A collective sends memory, and knows nothing of conjugates and negatives that are still to be taken of it.
        return arrived(redistribute_local_tensor(local.resolve_conj().resolve_neg(), source, target))

    return in_order(local, move) if tracing() else move(local)


def shares_memory(view: DTensor, base: torch.Tensor) -> bool:
    """Whether the one is a view of the other's memory, beyond what autograd believes."""
    return memory_of(view) == memory_of(base) or (
        isinstance(base, DTensor) and memory_of(view._local_tensor) == memory_of(base._local_tensor)
    )


# What `.data` is of all tensors, without looking at their class.
whole_data: Any = torch.Tensor.data


def give_attributes(attributes: dict[str, Any]) -> Callable[[], None]:
    """Let DTensors have these attributes, which they inherit otherwise; returns what takes them away."""
    mine = {name: attribute for name, attribute in attributes.items() if name not in vars(DTensor)}
    for name, attribute in mine.items():
        setattr(DTensor, name, attribute)

    def end() -> None:
        for name, attribute in mine.items():
            if vars(DTensor).get(name) is attribute:
                delattr(DTensor, name)

    return end
