"""All of torch's private names that convmesh uses. Nothing else in the library touches one.

`REQUIRED` lists them, so that a test can say which one a new torch release has lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement

Operator = torch._ops.OpOverload
Handler = Callable[[Operator, tuple[Any, ...], dict[str, Any]], Any]
Spec = DTensorSpec

OLDEST, TOO_NEW = (2, 13), (2, 16)

REQUIRED: tuple[tuple[object, str], ...] = (
    (DTensor, "_op_dispatcher"),
    (DTensor._op_dispatcher, "_custom_op_handlers"),
    (DTensor, "_local_tensor"),
    (DTensor, "_spec"),
    (DTensorSpec, "shard_order"),
    (DTensorSpec, "is_default_device_order"),
    (torch.distributed.tensor._redistribute, "redistribute_local_tensor"),
    (collectives, "all_to_all_single"),
    (collectives, "AsyncCollectiveTensor"),
    (collectives, "_are_we_tracing"),
    (torch.ops.aten._convolution_double_backward.default, "decompose"),
    (torch.library.Library, "_destroy"),
    (torch._C, "_DisablePythonDispatcher"),
    (torch.ops.aten.upsample_nearest2d.default, "py_kernels"),
    (torch.ops.aten.upsample_nearest2d.default, "_dispatch_cache"),
    (torch.compiler.config, "cache_key_tag"),
)


def check_version() -> None:
    """Refuse a torch release that the private names below were never tried with."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if not OLDEST <= (major, minor) < TOO_NEW:
        raise RuntimeError(
            f"convmesh extends torch's DTensor from {OLDEST[0]}.{OLDEST[1]} to below {TOO_NEW[0]}.{TOO_NEW[1]}, "
            f"and this is torch {torch.__version__}: install a torch release in that range, or another convmesh"
        )


def handlers() -> dict[Operator, Handler]:
    """DTensor's table of operators that are handled apart; it is consulted on every call."""
    table: dict[Operator, Any] = DTensor._op_dispatcher._custom_op_handlers
    return table


def local_of(tensor: DTensor) -> torch.Tensor:
    """This rank's part, without recording the access for autograd as `to_local` does."""
    local: torch.Tensor = tensor._local_tensor
    return wait(local)  # a redistribution may hand on a tensor whose collective is still under way


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Where the tensor's parts lie: hashable, and so the key by which plans are cached."""
    spec: DTensorSpec = tensor._spec
    if not tracing():
        return spec
    _compile_for_this_rank()
    return _settled(spec)


def _cache_tag() -> str:
    return f"convmesh-rank-{dist.get_rank()}"


def _compile_for_this_rank() -> None:
    """Keep torch.compile from handing one rank the code of another.

    Its cache on disk knows a DTensor by its global layout, which all ranks share, while their code differs.
    """
    if _cache_tag() not in torch.compiler.config.cache_key_tag:
        torch.compiler.config.cache_key_tag += _cache_tag()


def compile_for_any_rank() -> None:
    """Put back what `_compile_for_this_rank` has changed."""
    if dist.is_initialized():
        tag = torch.compiler.config.cache_key_tag
        torch.compiler.config.cache_key_tag = tag.replace(_cache_tag(), "")


def _settled(spec: DTensorSpec) -> DTensorSpec:
    """Without symbolic sizes: a plan holds for the sizes that it was made for, and int() makes the compiler know."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor's spec knows its shape"
    shape, stride = tuple(int(size) for size in meta.shape), tuple(int(step) for step in meta.stride)
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(torch.Size(shape), stride, meta.dtype))


def plain_order(spec: DTensorSpec) -> bool:
    """A dimension that is cut over several mesh dimensions is cut over the first of them first."""
    return DTensorSpec.is_default_device_order(spec.shard_order)


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def wrap(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor below autograd, where the public constructor would record itself."""
    tensor: DTensor = DTensor(local, spec, requires_grad=False)
    return tensor


def redistribute(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    moved: torch.Tensor = redistribute_local_tensor(local, source, target)
    return wait(moved)


def tracing() -> bool:
    """Under torch.compile, where sizes may be symbols."""
    return bool(collectives._are_we_tracing())


def all_to_all(
    buffer: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Start sending; the result is there after `wait`. A functional collective, so that compilers can trace it."""
    return collectives.all_to_all_single(buffer, list(receive_counts), list(send_counts), group)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The result of a collective, once it is there."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor


def composite(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What torch itself does for an operator that is made of others."""
    return operator.decompose(*args, **kwargs)


def keep_whole(operator: Operator) -> Callable[[], None]:
    """Keep torch.compile from taking an operator apart before DTensor sees it; returns what undoes that.

    Tensors of other kinds are still treated as before.
    """
    kernels = operator.py_kernels
    before = dict(kernels)

    def replacement(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not isinstance(args[0], DTensor):
                return kernel(*args, **kwargs)
            with torch._C._DisablePythonDispatcher():
                return operator(*args, **kwargs)

        return run

    def undo() -> None:
        kernels.update(before)
        operator._dispatch_cache.clear()

    kernels.update({key: replacement(kernel) for key, kernel in before.items()})
    operator._dispatch_cache.clear()
    return undo


def arguments(operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema."""
    schema = operator._schema.arguments
    if not kwargs and len(args) == len(schema):
        return args
    rest = (kwargs.get(argument.name, argument.default_value) for argument in schema[len(args) :])
    return (*args, *rest)
